"""The launcher between signals and ranks, with an mpirun that notices no signal, as some do not."""

import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from eprt.serve import launch
from eprt.serve.channel import bind_http
from eprt.serve.options import OptionError

# Starts two "ranks" and waits for them; blocks what it could be told to stop with. A rank drains on SIGUSR1, at once on
# the second, or not at all.
MPIRUN = """#!{python}
import signal, subprocess, sys
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1, signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
rank = '''
import signal, sys, time
signal.pthread_sigmask(signal.SIG_SETMASK, [])
taken = []
signal.signal(signal.SIGUSR1, lambda *_: taken.append(1))
open(sys.argv[3] + sys.argv[4], "w").close()
while len(taken) < {signals}:
    time.sleep(0.01)
'''
ranks = [subprocess.Popen([sys.executable, "-c", rank, "eprt.serve", "-n", "{ready}", str(i)]) for i in range(2)]
sys.exit(max(abs(rank.wait()) for rank in ranks))
"""


@pytest.fixture
def kept_signals():
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, before):
        signal.signal(number, handler)


def run(tmp_path: Path, monkeypatch, *, signals: int, sent: int, drain_timeout_s: float = 30.0) -> int:
    """Exit status of the launcher when ranks leave at the signals-th signal and `sent` are sent."""
    mpirun, ready = tmp_path / "mpirun", tmp_path / "ready-"
    mpirun.write_text(MPIRUN.format(python=sys.executable, signals=signals, ready=ready))
    mpirun.chmod(0o755)
    monkeypatch.setattr(launch, "find_mpirun", lambda: str(mpirun))
    options = SimpleNamespace(num_ranks=2, host="127.0.0.1", port=0, drain_timeout_s=drain_timeout_s)

    def send() -> None:
        deadline_s = time.monotonic() + 20
        while len(list(tmp_path.glob("ready-*"))) < 2 and time.monotonic() < deadline_s:
            time.sleep(0.01)
        for _ in range(sent):
            time.sleep(0.3)
            os.kill(os.getpid(), signal.SIGTERM)

    sender = threading.Thread(target=send)
    sender.start()
    started_s = time.monotonic()
    status = launch.launch(options, [])  # type: ignore[arg-type]
    sender.join()
    assert time.monotonic() - started_s < 20
    return status


def test_ranks_are_told_though_mpirun_is_deaf(tmp_path, monkeypatch, kept_signals):
    assert run(tmp_path, monkeypatch, signals=1, sent=1) == 0


def test_a_second_signal_reaches_them_too(tmp_path, monkeypatch, kept_signals):
    assert run(tmp_path, monkeypatch, signals=2, sent=2) == 0


def test_a_third_kills(tmp_path, monkeypatch, kept_signals):
    assert run(tmp_path, monkeypatch, signals=99, sent=3) != 0


def test_ranks_that_do_not_leave_in_time_are_killed(tmp_path, monkeypatch, kept_signals, capsys):
    monkeypatch.setattr(launch, "_LEAVE_S", 0.4)
    assert run(tmp_path, monkeypatch, signals=99, sent=1, drain_timeout_s=0.1) != 0
    assert "killing the ranks and mpirun" in capsys.readouterr().err


def test_an_address_that_is_taken_is_said_once_with_a_remedy():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(OptionError) as error:
            bind_http("127.0.0.1", port)
    told = f"cannot listen on 127.0.0.1:{port}: Address already in use; --port takes another, 0 any free one"
    assert str(error.value) == told
    with pytest.raises(OptionError, match=r"cannot listen on no\.such\.host\.invalid:0: [^;]+$"):
        bind_http("no.such.host.invalid", 0)
