"""The launcher of one host: signals, ends of ranks and of the frontend, with stand-ins for both."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from eprt.serve.options import OptionError, ServeOptions
from eprt.serve.ranks import host_launch, slots

# A frontend that serves at once, ends with `status` at the SIGTERM number `signals`, or when the file "end" appears.
FRONTEND = """
import os, pathlib, signal, sys, time
folder, notify, signals, status = pathlib.Path(sys.argv[1]), *map(int, sys.argv[2:])
taken = []
signal.signal(signal.SIGTERM, lambda *_: (taken.append(1), (folder / f"frontend-{len(taken)}").touch()))
if notify >= 0:
    os.write(notify, b"serving\\n")
(folder / "frontend").touch()
while len(taken) < signals and not (folder / "end").exists():
    time.sleep(0.01)
sys.exit(status)
"""
# A rank that leaves at SIGUSR1, or, stubborn, does not.
RANK = """
import pathlib, signal, sys, time
folder, rank, joins, stubborn = pathlib.Path(sys.argv[1]), *sys.argv[2:]
signal.signal(signal.SIGUSR1, lambda *_: stubborn == "True" or sys.exit(0))
(folder / f"rank-{rank}-{joins}").touch()
time.sleep(600)
"""


class Server:
    """One run of the launcher in this process, while a thread does as a test says."""

    def __init__(self, folder: Path, monkeypatch):
        self.folder = folder
        self.ranks: dict[tuple[int, bool], subprocess.Popen] = {}
        self.signals, self.status, self.serves, self.stubborn = 1, 0, True, False
        (folder / "config.json").write_text("{}")
        self.engine = SimpleNamespace(model_dir=str(folder), num_redundant_experts=0, device="cpu")
        monkeypatch.setattr(host_launch, "start_frontend", self._start_frontend)
        monkeypatch.setattr(slots, "start_rank", self._start_rank)

    def _start_frontend(self, config) -> subprocess.Popen:
        notify = config.notify_fd if self.serves else -1
        arguments = [self.folder, notify, self.signals, self.status]
        command = [sys.executable, "-c", FRONTEND, *map(str, arguments)]
        self.frontend = subprocess.Popen(command, pass_fds=(config.notify_fd,))
        return self.frontend

    def _start_rank(self, config) -> subprocess.Popen:
        command = [sys.executable, "-c", RANK, str(self.folder), str(config.rank), str(config.joins)]
        process = subprocess.Popen([*command, str(self.stubborn)])
        self.ranks[config.rank, config.joins] = process
        return process

    def until(self, *files: str) -> None:
        deadline_s = time.monotonic() + 60
        while not all((self.folder / file).exists() for file in files):
            assert time.monotonic() < deadline_s, files
            time.sleep(0.01)

    def run(self, script: Callable[[], object], **options) -> int:
        """The launcher's exit status; script() runs once the frontend and two ranks are there."""
        failed: list[BaseException] = []

        def act() -> None:
            try:
                self.until("frontend", "rank-0-False", "rank-1-False")
                script()
            except BaseException as error:
                failed.append(error)
                self.frontend.kill()

        acting = threading.Thread(target=act)
        acting.start()
        engine: Any = self.engine
        status = host_launch.launch(ServeOptions(engine, "model", num_ranks=2, port=0, **options))
        acting.join()
        assert not failed, failed
        assert self.frontend.returncode is not None
        assert all(process.returncode is not None for process in self.ranks.values())
        return status


@pytest.fixture
def server(tmp_path, monkeypatch):
    return Server(tmp_path, monkeypatch)


def stop() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def test_it_ends_with_the_frontend_and_the_ranks_leave(server):
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD)]
    assert server.run(stop) == 0
    assert [process.returncode for process in server.ranks.values()] == [0, 0]
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD)
    assert [signal.getsignal(number) for number in numbers] == handlers


def test_a_second_signal_reaches_the_frontend(server):
    server.signals = 2

    def script() -> None:
        stop()
        server.until("frontend-1")
        stop()

    assert server.run(script) == 0


def test_a_third_kills(server, capsys):
    server.signals, server.stubborn = 99, True

    def script() -> None:
        for number in range(1, 3):
            stop()
            server.until(f"frontend-{number}")
        stop()

    assert server.run(script) == 1
    assert {process.returncode for process in server.ranks.values()} == {-signal.SIGKILL}
    assert "was lost" not in capsys.readouterr().err


def test_what_does_not_end_in_time_is_killed(server, monkeypatch, capsys):
    monkeypatch.setattr(host_launch, "LEAVE_S", 0.2)
    server.signals = 99
    assert server.run(stop, drain_timeout_s=0.1) == 1
    assert "not ended 0.3 s after it was told to stop" in capsys.readouterr().err


def test_ranks_that_do_not_leave_after_the_frontend_are_killed(server, monkeypatch):
    monkeypatch.setattr(host_launch, "RANKS_LEAVE_S", 0.2)
    server.stubborn = True
    assert server.run(stop) == 0
    assert {process.returncode for process in server.ranks.values()} == {-signal.SIGKILL}


def test_a_lost_frontend_is_told(server, capsys):
    assert server.run(lambda: server.frontend.kill()) == 1
    told = f"eprt: the HTTP frontend (pid {server.frontend.pid}) was lost: killed by signal 9; stopping\n"
    assert capsys.readouterr().err == told


def test_a_frontend_that_has_said_why_is_believed(server, capsys):
    server.status = 1
    assert server.run(lambda: (server.folder / "end").touch()) == 1
    assert capsys.readouterr().err == ""


def test_a_rank_that_the_frontend_never_heard_of_ends_the_start(server, monkeypatch, capsys):
    monkeypatch.setattr(host_launch, "_FRONTEND_NOTICES_S", 0.1)
    server.serves = False
    assert server.run(lambda: server.ranks[1, False].kill(), max_lost_ranks=1) == 1
    pid = server.ranks[1, False].pid
    assert capsys.readouterr().err == f"eprt: rank 1 (pid {pid}) ended: killed by signal 9; stopping\n"


@pytest.mark.parametrize("redundant, max_lost, fits", [(0, 1, False), (20, 1, False), (21, 1, True), (64, 2, True)])
def test_too_few_slots_for_the_losses_are_refused_with_the_arithmetic(tmp_path, redundant, max_lost, fits):
    (tmp_path / "config.json").write_text('{"n_routed_experts": 64}')
    engine = SimpleNamespace(model_dir=str(tmp_path), num_redundant_experts=redundant)
    options = SimpleNamespace(engine=engine, max_lost_ranks=max_lost)
    if fits:
        host_launch._check_capacity(options, 4)  # type: ignore[arg-type]
        return
    words = rf"--max-lost-ranks {max_lost}: .*the model has 64: --num-redundant-experts \d+ would do"
    with pytest.raises(OptionError, match=words):
        host_launch._check_capacity(options, 4)  # type: ignore[arg-type]


def test_a_lost_rank_is_told_and_the_others_stay(server, capsys):
    def script() -> None:
        server.ranks[1, False].kill()
        deadline_s = time.monotonic() + 60
        while server.ranks[1, False].returncode is None and time.monotonic() < deadline_s:
            time.sleep(0.01)
        assert server.ranks[0, False].poll() is None
        stop()

    assert server.run(script, max_lost_ranks=1) == 0
    pid = server.ranks[1, False].pid
    assert capsys.readouterr().err == f"eprt: rank 1 (pid {pid}) ended: killed by signal 9\n"
    assert list(server.ranks) == [(0, False), (1, False)]


def test_a_lost_rank_is_started_again(server, monkeypatch, capsys):
    monkeypatch.setattr(slots, "FIRST_DELAY_S", 0.1)

    def script() -> None:
        server.ranks[0, False].kill()
        server.until("rank-0-True")
        stop()

    assert server.run(script, max_lost_ranks=1, restart_lost_ranks=True) == 0
    assert "ended: killed by signal 9; it is started again in 0.1 s" in capsys.readouterr().err
    assert list(server.ranks) == [(0, False), (1, False), (0, True)]
