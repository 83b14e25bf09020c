"""Experts move in a running server when asked to over HTTP, and nobody who generates notices."""

import contextlib
import copy
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import httpx
import pytest

from eprt.serve.running import RunningServer
from tests.serve.conftest import MODEL, token_ids
from tests.serve.processes import PATIENCE_S, wait_until

# An address of this process alone: nobody takes the port between one server and the next.
HOST = f"127.88.{os.getpid() // 250 % 250}.{1 + os.getpid() % 250}"


@pytest.fixture(scope="module")
def server():
    options = ("--served-model-name", "demo", "--num-redundant-experts", "4", "--load-window", "0.5")
    with RunningServer(MODEL, 4, *options, "--host", HOST) as running:
        yield running


@pytest.fixture
def http(server):
    with httpx.Client(base_url=server.url, timeout=PATIENCE_S) as client:
        yield client


def settle(http) -> dict:
    """The rebalancer's state once nothing is under way."""

    def settled() -> dict | None:
        state = http.get("/v1/eprt/rebalance").json()
        return None if state["migration"]["state"] in ("planning", "running") else state

    return wait_until(settled, "an end")


@contextlib.contextmanager
def skewed_load(url: str, problems: list):
    """Four clients with sums only: a few experts get most of the tokens. Every answer must be the sum."""
    stop = threading.Event()

    def ask(client: int) -> None:
        with httpx.Client(base_url=url, timeout=PATIENCE_S) as http:
            k = 0
            while not stop.is_set():
                k, a, b = k + 1, 10 + (7 * client + k) % 80, 11 + (3 * k) % 70
                messages = [{"role": "user", "content": f"What is {a} + {b}?"}]
                body = {"model": "demo", "messages": messages, "temperature": 0}
                answer = http.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]
                if answer != f"{a} + {b} = {a + b}":
                    problems.append((a, b, answer))

    clients = [threading.Thread(target=ask, args=(client,)) for client in range(4)]
    for client in clients:
        client.start()
    try:
        yield
    finally:
        stop.set()
        for client in clients:
            client.join()


def decisions(http, verdict: str) -> list[dict]:
    state = http.get("/v1/eprt/rebalance").json()
    return [d for d in state["decisions"] if d["asked_by"] in ("dry-run", "auto") and d["verdict"] == verdict]


def test_a_skewed_load_is_balanced_by_itself_and_no_answer_changes(server, http):
    """First it only says what it would do, then it does it; every decision is in the log with its figures."""
    before, placement, problems = token_ids(http), http.get("/v1/eprt/placement").json(), []
    with skewed_load(server.url, problems):
        assert http.post("/v1/eprt/rebalance", json={"mode": "dry-run"}).json()["mode"] == "dry-run"
        would = wait_until(lambda: decisions(http, "dry_run"), "a dry run")[-1]
        assert would["after"] < would["before"] - 0.02 and would["moved_experts"] > 0
        assert http.get("/v1/eprt/placement").json() == placement
        http.post("/v1/eprt/rebalance", json={"mode": "auto"})
        did = wait_until(lambda: decisions(http, "migrate"), "a migration")[-1]
        state = settle(http)
        assert token_ids(http) == before
    assert not problems, problems
    assert did["saving_us"] > did["cost_us"] > 0 and did["lifetime_steps"] > 0
    assert state["migration"]["state"] == "done" and state["epoch"] > placement["epoch"]
    assert http.post("/v1/eprt/rebalance", json={"mode": "off"}).json()["mode"] == "off"
    settle(http)  # it may have decided once more before that
    log = server.output()
    for verdict in ("dry_run: worth it; dry run", "migrate: worth it"):
        assert re.search(rf"rebalance {verdict} \(max/mean 1\.\d+ -> 1\.\d+, saves", log)
    metrics = http.get("/metrics").text
    assert counter(metrics, 'eprt_rebalance_decisions_total{verdict="migrate"}') >= 1
    assert counter(metrics, 'eprt_migrated_experts_total{way="local"}') >= did["moved_experts"]
    assert counter(metrics, "eprt_rank_load_max_over_mean") >= 1


def counter(metrics: str, name: str) -> float:
    (line,) = [line for line in metrics.splitlines() if line.startswith(f"{name} ")]
    return float(line.rpartition(" ")[2])


def test_a_posted_placement_is_reached_and_changes_no_token(http):
    before = token_ids(http)
    placement = http.get("/v1/eprt/placement").json()
    rows = placement["physical_to_logical_map"]
    wanted = {**copy.deepcopy(placement), "slot_weight": None}
    wanted["physical_to_logical_map"] = [row[9:] + row[:9] for row in rows]  # every expert to the rank before
    answer = http.post("/v1/eprt/rebalance", json={"placement": wanted})
    assert answer.status_code in (200, 202), answer.text
    during = token_ids(http)
    settle(http)
    reached = http.get("/v1/eprt/placement").json()
    assert reached["physical_to_logical_map"] == wanted["physical_to_logical_map"]
    assert reached["epoch"] > placement["epoch"]
    assert before == during == token_ids(http)


def test_a_placement_that_does_not_fit_is_named(http):
    placement = http.get("/v1/eprt/placement").json()
    for change, words in (
        (lambda rows: rows.pop(), "layers"),
        (lambda rows: rows[1].__setitem__(0, 99), "99"),
        (lambda rows: [row.pop() for row in rows], "slots"),
    ):
        wrong = {**copy.deepcopy(placement), "slot_weight": None}
        change(wrong["physical_to_logical_map"])
        answer = http.post("/v1/eprt/rebalance", json={"placement": wrong})
        error = answer.json()["error"]
        assert answer.status_code == 400 and words in error["message"], error
    assert http.get("/v1/eprt/placement").json() == placement


@pytest.mark.parametrize(
    "body, param",
    [
        ({"mode": "on"}, "mode"),
        ({"mode": "auto", "dry_run": True}, "mode"),
        ({"cancel": True, "dry_run": True}, "cancel"),
        ({"max_moves_per_layer": 0}, "max_moves_per_layer"),
        ({"placment": {}}, "placment"),
    ],
)
def test_what_cannot_be_asked_is_named(http, body, param):
    answer = http.post("/v1/eprt/rebalance", json=body)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param, answer.text
    assert http.get("/v1/eprt/rebalance").json()["mode"] == "off"


def test_the_daemon_balances_and_survives_the_death_and_return_of_the_server(server):
    """Last: it kills the server. The next one, on the same port, has two ranks."""
    port, problems = server.url.rpartition(":")[2], []
    command = [sys.executable, "-m", "eprt.cli", "balancer", "--url", server.url, "--interval", "0.5", "--json"]
    with tempfile.NamedTemporaryFile("w") as output:
        daemon = subprocess.Popen([*command, "--min-gain", "0"], stdout=output, stderr=subprocess.PIPE, text=True)

        def states() -> list[dict]:
            # Opened anew: the daemon writes on from wherever this file's own position is.
            lines = Path(output.name).read_text().splitlines(keepends=True)
            return [json.loads(line) for line in lines if line.endswith("\n")]

        try:
            with skewed_load(server.url, problems):
                done = wait_until(lambda: [s for s in states() if " done: " in s["news"]], "a migration")[-1]
            assert not problems and done["migration"]["state"] == "done" and done["epoch"] > 0
            server.kill()
            wait_until(lambda: states()[-1]["state"] == "unreachable", "the loss")
            with RunningServer(MODEL, 2, "--host", HOST, "--port", port) as again:
                assert again.url == server.url
                back = wait_until(lambda: [s for s in states() if "the server was restarted" in s["news"]], "it")[-1]
                assert back["server_id"] != done["server_id"] and back["epoch"] == back["windows"] == 0
        finally:
            daemon.send_signal(signal.SIGTERM)
            _, err = daemon.communicate(timeout=PATIENCE_S)
        assert daemon.returncode == 0 and "eprt balancer: stopped" in err, err
