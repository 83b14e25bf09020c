"""`eprt balancer`: flags, lines, JSON, signals and exit status."""

import json
import signal
import subprocess
import sys

import pytest
from eprt.balancer.controller import Controller
from eprt.balancer.daemon import Daemon
from eprt.balancer.daemon_main import main
from eprt.balancer.remote import RemoteServer


def test_a_wrong_key_or_flag_ends_it_in_one_line(played, capsys):
    played.key = "secret"
    assert Daemon(RemoteServer(played.url, played.key), Controller()).poll().state == "watching"
    for arguments, words in (
        (["--url", played.url], "401: wrong or missing API key; --api-key gives the server's key"),
        (["--url", "http://["], "--url 'http://[': must be the address of a server"),
        (["--url", "http://a:99999"], "must be the address of a server"),
        (["--url", "http://a b"], "must be the address of a server"),
        (["--url", "http://"], "must be the address of a server"),
        (["--url", "localhost:8000"], "--url localhost:8000: must begin with http:// or https://"),
        (["--url", played.url, "--interval", "0"], "--interval 0.0: must be above 0"),
        (
            ["--url", played.url, "--interval", "1e10"],
            "--interval 10000000000.0: must be above 0 and below 1e+09 seconds",
        ),
        (["--url", played.url, "--api-key", "a\nb"], "EPRT_API_KEY: a key must be printable ASCII"),
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
    played.polls_until_done = 3
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
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0 and "stopped; the server continues migration 1" in err, err
    assert all(json.loads(line)["schema"] == "eprt.balancer/1" for line in out.splitlines())
    assert [line["state"] for line in lines] == ["watching"] * 3 + ["migrating"] * 2
    assert lines[3]["decision"]["verdict"] == "migrate" and lines[3]["url"] == played.url
