"""RunningServer where the server does not come up; servers that do are all of tests/serve."""

import sys

import pytest

from eprt.serve import running
from eprt.serve.running import RunningServer


def popen_running(monkeypatch, code: str) -> None:
    """Starts this program instead of the server."""
    popen = running.subprocess.Popen
    monkeypatch.setattr(
        running.subprocess, "Popen", lambda command, **options: popen([sys.executable, "-c", code], **options)
    )


def test_a_server_that_ends_is_told_with_what_it_printed(monkeypatch):
    popen_running(monkeypatch, "print('no such model'); raise SystemExit(2)")
    with pytest.raises(RuntimeError, match=r"(?s)the server ended with 2; it printed:\nno such model"):
        RunningServer("nowhere").wait_ready()


def test_a_server_that_is_not_ready_in_time_is_killed(monkeypatch):
    popen_running(monkeypatch, "print('loading', flush=True); input and __import__('signal').pause()")
    server = RunningServer("model", timeout_s=0)
    with pytest.raises(TimeoutError, match="the server was not ready within 0 s; it printed:"):
        server.wait_ready()
    assert server.process.poll() is not None


def test_the_announcement_says_where_the_server_is(monkeypatch):
    announcement = "eprt serving my model on http://127.0.0.1:8001, 2 ranks"
    popen_running(monkeypatch, f"print('loading\\n{announcement}', flush=True); __import__('signal').pause()")
    server = RunningServer("model")
    try:
        server.wait_ready()
        assert (server.model, server.url) == ("my model", "http://127.0.0.1:8001")
        with pytest.raises(TimeoutError, match="the server still runs after 0 s"):
            server.wait_exit(timeout_s=0)
    finally:
        server.kill()


def test_flags_and_variables_reach_the_server(monkeypatch):
    started = []
    monkeypatch.setattr(running.subprocess, "Popen", lambda command, **options: started.append((command, options)))
    RunningServer("model", 3, "--seed", "1", variables={"EPRT_TIMEOUT_S": "7"})
    RunningServer("model", 3, under="mpirun")
    (launched, options), (under_mpirun, _) = started
    assert launched[1:] == ["-m", "eprt.serve", "--model", "model", "--port", "0", "--seed", "1", "-n", "3"]
    assert options["env"]["EPRT_TIMEOUT_S"] == "7" and options["start_new_session"]
    assert under_mpirun[-7:] == [sys.executable, *launched[1:7]] and under_mpirun[-9:-7] == ["-n", "3"]
