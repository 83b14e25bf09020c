"""The launcher between signals and ranks, with an mpirun that notices no signal, as some do not."""

import os
import signal
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from eprt.serve import device_check
from eprt.serve.options import OptionError, ServeOptions
from eprt.serve.ranks import launch

# Starts two "ranks" and waits for them; blocks what it could be told to stop with. A rank drains on SIGUSR1, at once on
# the second, or not at all.
MPIRUN = """#!{python}
import signal, subprocess, sys, time
if {deaf}:
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1, signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
open("{folder}/mpirun-0", "w").close()
rank = '''
import signal, sys, time
taken = []
def take(*_):
    taken.append(1)
    open("{folder}/taken-" + str(len(taken)) + "-" + sys.argv[3], "w").close()
signal.signal(signal.SIGUSR1, take)
signal.pthread_sigmask(signal.SIG_SETMASK, [])
open("{folder}/ready-" + sys.argv[3], "w").close()
while len(taken) < {signals}:
    time.sleep(0.01)
'''
while {late} and signal.SIGUSR1 not in signal.sigpending():
    time.sleep(0.01)
ranks = [subprocess.Popen([sys.executable, "-c", rank, "eprt.serve", "-n", str(i)]) for i in range(2)]
sys.exit(max(abs(rank.wait()) for rank in ranks))
"""
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@pytest.fixture
def kept_signals():
    before = [signal.getsignal(number) for number in SIGNALS]
    yield
    for number, handler in zip(SIGNALS, before):
        signal.signal(number, handler)


def run(
    folder: Path,
    monkeypatch,
    *,
    signals: int,
    sent: int,
    drain_timeout_s: float = 30.0,
    late: bool = False,
    deaf: bool = True,
) -> int:
    """Exit status of the launcher when ranks leave at the signals-th signal and `sent` are sent.

    late: the ranks are started only when mpirun has a signal. deaf: mpirun does not die of it.
    """
    mpirun, handlers = folder / "mpirun", [signal.getsignal(number) for number in SIGNALS]
    mpirun.write_text(MPIRUN.format(python=sys.executable, signals=signals, folder=folder, late=late, deaf=deaf))
    mpirun.chmod(0o755)
    monkeypatch.setattr(launch, "mpirun_command", lambda *arguments: [str(mpirun), *arguments])
    engine: Any = SimpleNamespace(device="cpu")
    options = ServeOptions(engine, "model", num_ranks=2, port=0, drain_timeout_s=drain_timeout_s)

    def until(condition) -> None:
        while not condition() and launching.is_set():
            time.sleep(0.01)

    def send() -> None:
        until(lambda: signal.getsignal(signal.SIGHUP) is not handlers[-1])  # else the signal would end this process
        until(lambda: (folder / "mpirun-0").exists() if late or not deaf else len(list(folder.glob("ready-*"))) == 2)
        for number in range(1, 1 + sent):
            if not launching.is_set():
                return
            os.kill(os.getpid(), signal.SIGTERM)
            until(lambda taken=f"taken-{number}-*": len(list(folder.glob(taken))) == 2)

    sender, launching = threading.Thread(target=send), threading.Event()
    launching.set()
    sender.start()
    try:
        return launch.launch(options, [])
    finally:
        launching.clear()
        sender.join()


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


def test_ranks_that_come_after_the_signal_are_told(tmp_path, monkeypatch, kept_signals):
    assert run(tmp_path, monkeypatch, signals=1, sent=1, late=True) == 0


def test_an_mpirun_so_young_that_it_dies_of_the_signal_was_told_to_stop(tmp_path, monkeypatch, kept_signals):
    assert run(tmp_path, monkeypatch, signals=1, sent=1, late=True, deaf=False) == 0


def test_an_mpirun_that_is_killed_is_told_of(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(launch, "mpirun_command", lambda *arguments: ["/bin/sh", "-c", "kill -9 $$"])
    engine: Any = SimpleNamespace(device="cpu")
    assert launch.launch(ServeOptions(engine, "model", num_ranks=2, port=0), []) == 128 + 9
    told = capfd.readouterr().err
    assert told.startswith("eprt: mpirun (pid ") and told.endswith(
        "was lost: killed by signal 9; the ranks drain and stop\n"
    )


@pytest.mark.parametrize(("status", "told"), [(0, False), (1, True), (2, False)])
def test_an_mpirun_that_was_told_to_stop_does_not_end_in_silence(monkeypatch, capfd, status, told):
    """It answers SIGTERM with status 1 and no word. With 2 a rank has said what is wrong with the flags."""
    monkeypatch.setattr(launch, "mpirun_command", lambda *arguments: ["/bin/sh", "-c", f"exit {status}"])
    engine: Any = SimpleNamespace(device="cpu")
    assert launch.launch(ServeOptions(engine, "model", num_ranks=2, port=0), []) == status
    assert ("has ended with status 1: a rank did" in capfd.readouterr().err) == told


def test_a_host_without_gpus_is_told_before_mpirun_starts(monkeypatch):
    monkeypatch.setattr(device_check, "why_no_gpu", lambda: "there is no driver")
    monkeypatch.setattr(launch.subprocess, "Popen", lambda *arguments, **options: pytest.fail("started"))
    engine: Any = SimpleNamespace(device="cuda")
    with pytest.raises(OptionError, match="--device cuda: there is no driver"):
        launch.launch(ServeOptions(engine, "model", num_ranks=2, port=0), [])
