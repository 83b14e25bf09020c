"""`eprt balancer` against a server that this test plays over HTTP: what it plans, whom it waits for, how it ends. The
real server's turn is in tests/serve/test_rebalance.py."""

import json
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
from eprt.balancer import Placement
from eprt.balancer.controller import Controller
from eprt.balancer.daemon import Daemon
from eprt.balancer.daemon_main import main
from eprt.balancer.remote import RemoteServer
from eprt.balancer.trigger import TriggerConfig

RATE_E = np.array([400, 300, 100, 100, 100])  # tokens per second
FIRST = Placement(np.array([[0, 1, 2, 3, 4, -1]]), num_gpus=2)


class Played:
    """Five seconds of load pass with each look at it. failure: (status, message) that answers everything."""

    def __init__(self):
        self.server_id, self.mode, self.failure, self.speeds = "one", "off", None, [1.0, 1.0]
        self.serving, self.migration, self.state = FIRST, None, "idle"
        self.seconds, self.posted, self.key = 0, [], None
        self.looks_until_done = 0  # 0: never by itself
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                outer.answer(self, None)

            def do_POST(self):
                outer.answer(self, json.loads(self.rfile.read(int(self.headers["content-length"]))))

            def log_message(self, *args):
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()

    def answer(self, handler, body):
        status, document = 200, None
        if self.failure is not None:
            status, document = self.failure[0], {"error": {"message": self.failure[1]}}
        elif self.key is not None and handler.headers.get("authorization") != f"Bearer {self.key}":
            status, document = 401, {"error": {"message": "wrong or missing API key"}}
        else:
            document = getattr(self, handler.path.rpartition("/")[2])(body)
        data = json.dumps(document).encode()
        handler.send_response(status)
        handler.send_header("content-length", str(len(data)))
        handler.end_headers()
        handler.wfile.write(data)

    def load(self, body):
        self.seconds += 5
        tokens = (RATE_E * self.seconds).tolist()
        layer = {"per_expert": tokens, "per_expert_prefill": [0] * 5}
        rows = sum(tokens)
        return {"server_id": self.server_id, "time_s": self.seconds, "layers": [layer], "num_steps": 10 * self.seconds,
                "expert_us": 20.0 * rows, "expert_rows": rows, "expert_bytes": 1000, "copied_bytes": 0,
                "copied_s": 0.0}  # fmt: skip

    def placement(self, body):
        return self.serving.to_json()

    def diagnose(self, body):
        return {"rank_speeds": self.speeds}

    def rebalance(self, body):
        if body is not None:
            self.posted.append(Placement.from_json(body["placement"]))
            self.posted_speeds = body.get("rank_speeds")
            self.state = "migrating"
            self.migration = {"job_id": len(self.posted), "state": "running", "reason": "", "rounds_done": 0,
                              "num_rounds": 1, "moves": {"local": 1}, "seconds": 0.1}  # fmt: skip
        elif self.state == "migrating" and self.looks_until_done:
            self.looks_until_done -= 1
            if not self.looks_until_done:
                self.end_migration()
        return {"schema": "eprt.rebalance/1", "server_id": self.server_id, "mode": self.mode, "state": self.state,
                "epoch": self.serving.epoch, "migration": self.migration}  # fmt: skip

    def end_migration(self, state="done", reason=""):
        self.state, self.migration = "idle", {**(self.migration or {}), "state": state, "reason": reason}
        if state == "done":
            self.serving = replace(self.posted[-1], epoch=self.serving.epoch + 1)

    def restart(self):
        self.server_id, self.seconds, self.serving, self.state, self.migration = "two", 0, FIRST, "idle", None


@pytest.fixture
def played():
    server = Played()
    yield server
    server.http.shutdown()
    server.http.server_close()


def make(played: Played, slow_ranks: bool = False, **options) -> Daemon:
    return Daemon(RemoteServer(played.url, played.key), Controller(TriggerConfig(**options)), 5.0, slow_ranks)


def looks(daemon: Daemon, count: int) -> list[str]:
    return [daemon.poll().state for _ in range(count)]


def test_it_watches_plans_posts_and_follows(played):
    daemon = make(played)
    assert looks(daemon, 3) == ["watching"] * 3 and daemon.pause_s == 5
    status = daemon.poll()
    assert status.state == "migrating" and status.decision.migrate and daemon.job_id == 1 and daemon.pause_s < 1
    assert status.max_over_mean == pytest.approx(1.6) and status.lifetime_s == pytest.approx(15, rel=0.1)
    assert played.posted[0].gpu_load([RATE_E]).max() == 500
    assert "migrate: worth it" in status.news and "max/mean 1.600 over 3 windows" in str(status)
    assert looks(daemon, 2) == ["migrating"] * 2
    played.end_migration()
    status = daemon.poll()
    assert status.state == "watching" and "migration 1 done: 1 experts in 0.1 s" in status.news
    assert daemon.job_id is None and daemon.pause_s == 5 and status.epoch == 1
    assert looks(daemon, 9) == ["watching"] * 9 and len(played.posted) == 1
    assert daemon.poll().max_over_mean == pytest.approx(1.0)


def test_a_migration_that_failed_is_not_tried_again_at_once(played):
    daemon = make(played, cooldown_s=0)
    looks(daemon, 4)
    played.end_migration("rolled_back", "the deadline of the round passed, says rank 1")
    assert "migration 1 rolled_back: 1 experts in 0.1 s: the deadline" in daemon.poll().news
    assert looks(daemon, 6) == ["watching"] * 6 and len(played.posted) == 1


def test_dry_run_posts_nothing_and_a_server_that_balances_itself_is_left_alone(played):
    daemon = make(played, dry_run=True)
    looks(daemon, 3)
    status = daemon.poll()
    assert status.state == "watching" and status.decision.verdict == "dry_run"
    played.mode = "auto"
    daemon = make(played)
    status = [daemon.poll() for _ in range(6)][-1]
    assert status.state == "standing by" and "--rebalance auto" in status.news
    assert not played.posted


def test_it_waits_for_a_server_longer_and_longer(played):
    daemon, pauses = make(played), []
    played.failure = (503, "no new requests: the model is loading")
    for _ in range(7):
        status = daemon.poll()
        pauses.append(daemon.pause_s)
    assert status.state == "unreachable" and status.news.endswith("answers 503: no new requests: the model is loading")
    assert pauses == [0.5, 1, 2, 4, 5, 5, 5]
    played.failure = None
    assert daemon.poll().state == "watching" and daemon.pause_s == 5
    played.failure = (409, "this model has no MoE layers")
    assert daemon.poll().state == "refused" and daemon.pause_s == 0.5
    nobody = Daemon(RemoteServer("http://127.0.0.1:9"), Controller())
    status = nobody.poll()
    assert status.state == "unreachable" and "no answer: " in status.news


def test_after_a_restart_everything_begins_anew(played):
    daemon = make(played)
    looks(daemon, 4)
    assert daemon.job_id == 1
    played.restart()
    status = daemon.poll()
    assert daemon.job_id is None and "the server was restarted" in status.news and status.windows == 0
    assert looks(daemon, 8) == ["watching"] * 8  # a failed migration is not followed by another at once
    assert len(played.posted) == 1


def test_what_cannot_be_planned_for_is_told_and_tried_again_later(played):
    """The placement of another model than the load's, as while one server takes another's place."""
    daemon = make(played)
    played.serving = Placement(np.array([[0, 1, 2, -1]]), num_gpus=2)
    assert daemon.poll().state == "watching"
    first = daemon.poll()
    assert first.state == "refused" and "load_LE has shape (1, 5)" in first.news and daemon.pause_s < 5
    assert looks(daemon, 4) == ["refused"] * 4 and daemon.pause_s == 5 and not played.posted
    played.serving = FIRST
    assert looks(daemon, 2) == ["migrating"] * 2 and len(played.posted) == 1


def test_slow_ranks_get_less_where_that_is_wanted(played):
    played.speeds = [1.0, 0.5]
    daemon = make(played, slow_ranks=True)
    looks(daemon, 3)
    status = daemon.poll()
    assert status.decision.migrate and status.rank_speeds == [1.0, 0.5] and "slow ranks 1 (0.50)" in str(status)
    load_G = played.posted[0].gpu_load([RATE_E])[0]
    assert load_G[1] < 0.7 * load_G[0], load_G
    assert played.posted_speeds == [1.0, 0.5]


def test_a_wrong_key_or_flag_ends_it_in_one_line(played, capsys):
    played.key = "secret"
    assert make(played).poll().state == "watching"
    for arguments, words in (
        (["--url", played.url], "401: wrong or missing API key; --api-key gives the server's key"),
        (["--url", "localhost:8000"], "--url localhost:8000: must begin with http:// or https://"),
        (["--url", played.url, "--interval", "0"], "--interval 0.0: must be above 0"),
        (["--url", played.url, "--max-moves-per-layer", "0"], "--max-moves-per-layer 0: must be at least 1"),
        (["--url", played.url, "--cooldown", "-1"], "--cooldown -1.0: must be finite"),
        (["--url", played.url, "--min-gain", "nan"], "--min-gain nan: must be finite"),
        (["--url", played.url, "--us-per-crossing", "-1"], "--us-per-crossing -1.0: must be finite"),
    ):
        assert main(arguments) == 2
        err = capsys.readouterr().err
        assert words in err and err.count("\n") == 1


def test_once_ends_after_the_first_decision_and_lines_tell_what_happens(played, capsys, monkeypatch):
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)
    assert main(["--url", played.url, "--interval", "0.01", "--once", "--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 and not played.posted, lines  # the looks in between bring nothing new
    assert " watching, placement 0" in lines[0] and lines[1].count("dry_run: worth it; dry run (max/mean 1.600 ->") == 1
    played.looks_until_done = 3
    assert main(["--url", played.url, "--interval", "0.1", "--once"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[3].rstrip(",") for line in lines] == ["watching", "migrating", "watching"], lines
    assert "migrate: worth it" in lines[1] and "migration 1 done" in lines[2]


@pytest.mark.parametrize("number", ["SIGTERM", "SIGINT"])
def test_signals_end_it_cleanly_and_json_is_one_object_a_line(played, number):
    command = [sys.executable, "-m", "eprt.balancer.daemon_main", "--url", played.url, "--interval", "0.1", "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    lines = [json.loads(process.stdout.readline()) for _ in range(5)]
    process.send_signal(getattr(signal, number))
    out, err = process.communicate(timeout=100)
    assert process.returncode == 0 and "stopped; the server continues migration 1" in err, err
    assert all(json.loads(line)["schema"] == "eprt.balancer/1" for line in out.splitlines())
    assert [line["state"] for line in lines] == ["watching"] * 3 + ["migrating"] * 2
    assert lines[3]["decision"]["verdict"] == "migrate" and lines[3]["url"] == played.url
