"""The launcher of a host without the frontend: with stand-ins for its ranks, while a thread is host 0."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from eprt.serve.hosts import guest
from eprt.serve.hosts.guest import GuestLauncher
from eprt.serve.hosts.link import HostLink
from eprt.serve.hosts.messages import Ended, RankEnded, Serving, StopAsked, ToFirstHost, ToOtherHost
from eprt.serve.options import RankConfig
from eprt.serve.ranks import slots

PATIENCE_S = 100.0
# A rank that leaves at SIGUSR1.
RANK = """
import pathlib, signal, sys, time
signal.signal(signal.SIGUSR1, lambda *_: sys.exit(0))
pathlib.Path(sys.argv[1], f"rank-{sys.argv[2]}").touch()
time.sleep(600)
"""


class Guest:
    """One run of the launcher of host 1 of 2, in this process."""

    def __init__(self, folder: Path, monkeypatch):
        self.folder, self.ranks = folder, {}
        self._heard: list = []
        mine, other = socket.socketpair()
        self.host0 = HostLink(mine, ToFirstHost)
        self.options = SimpleNamespace(
            num_ranks=2, nnodes=2, node_rank=1, dist_init_addr="a:1", drain_timeout_s=PATIENCE_S
        )
        config = RankConfig(self.options, 0, 4, None, "tcp:a:2", "secret", 1)  # type: ignore[arg-type]
        monkeypatch.setattr(slots, "start_rank", self._start_rank)
        self.launcher = GuestLauncher(config, HostLink(other, ToOtherHost))

    def _start_rank(self, config: RankConfig) -> subprocess.Popen:
        process = subprocess.Popen([sys.executable, "-c", RANK, str(self.folder), str(config.rank)])
        self.ranks[config.rank] = process
        return process

    def hear(self) -> object:
        """What the launcher says next."""
        deadline_s = time.monotonic() + PATIENCE_S
        while not self._heard:
            assert time.monotonic() < deadline_s, "silence"
            self._heard += self.host0.receive(0.1)
        return self._heard.pop(0)

    def run(self, script: Callable[[], object]) -> int:
        """The exit status; script() runs once both ranks are there."""
        failed: list[BaseException] = []

        def act() -> None:
            try:
                deadline_s = time.monotonic() + PATIENCE_S
                while not all((self.folder / f"rank-{rank}").exists() for rank in (2, 3)):
                    assert time.monotonic() < deadline_s
                    time.sleep(0.01)
                script()
            except BaseException as error:
                failed.append(error)
                self.host0.close()

        thread = threading.Thread(target=act)
        thread.start()
        status = self.launcher.run()
        thread.join()
        if failed:
            raise failed[0]
        assert all(process.returncode is not None for process in self.ranks.values())
        return status


@pytest.fixture
def host(tmp_path, monkeypatch):
    before = signal.getsignal(signal.SIGTERM)
    made = Guest(tmp_path, monkeypatch)
    yield made
    made.host0.close()
    for process in made.ranks.values():
        process.kill()
        process.wait()
    assert signal.getsignal(signal.SIGTERM) == before


def test_it_starts_its_own_ranks_and_ends_with_the_server(host, capfd):
    def script() -> None:
        host.host0.send(Serving())
        host.host0.send(Ended(0, ""))

    assert host.run(script) == 0 and sorted(host.ranks) == [2, 3]
    assert [process.returncode for process in host.ranks.values()] == [0, 0]
    assert capfd.readouterr().err == ("eprt: host 1 of 2, 2 ranks: the server is ready; its HTTP port is on host 0\n")


def test_signals_go_to_host_0(host):
    def script() -> None:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGTERM)
            assert host.hear() == StopAsked()
        host.host0.send(Ended(0, ""))

    assert host.run(script) == 0


def test_a_third_signal_kills_the_ranks_here(host):
    def script() -> None:
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGINT)
            assert host.hear() == StopAsked()
        ends = [host.hear(), host.hear()]
        assert all(isinstance(end, RankEnded) and end.status == -signal.SIGKILL for end in ends)
        host.host0.send(Ended(1, ""))

    assert host.run(script) == 1


def test_a_killed_rank_is_told_and_host_0_says_how_it_ends(host, capfd):
    def script() -> None:
        host.ranks[3].kill()
        assert host.hear() == RankEnded(3, host.ranks[3].pid, -signal.SIGKILL)
        host.host0.send(Ended(1, "rank 3 (pid 7, host b) was lost: its process is gone"))

    assert host.run(script) == 1
    assert capfd.readouterr().err == "eprt: rank 3 (pid 7, host b) was lost: its process is gone\n"


def test_host_0_that_is_gone_is_told_once_its_ranks_leave(host, capfd):
    def script() -> None:
        host.host0.close()
        for process in host.ranks.values():
            process.send_signal(signal.SIGUSR1)

    assert host.run(script) == 1
    assert capfd.readouterr().err == (
        "eprt: host 0 (a:1) was lost: its launcher is gone; the ranks of this host stop\n"
    )


def test_ranks_that_outlive_a_lost_host_0_are_killed(host, monkeypatch):
    monkeypatch.setattr(guest, "LEAVE_S", 0.0)
    host.options.drain_timeout_s = 0.1
    monkeypatch.setattr(
        guest, "wait_ended", lambda running, *_: [running.reap() for _ in iter(lambda: running.num_running, 0)]
    )
    assert host.run(host.host0.close) == 1


def test_host_0_that_says_nothing_after_the_last_rank(host, monkeypatch, capfd):
    monkeypatch.setattr(guest, "_HOST_0_TELLS_S", 0.0)

    def script() -> None:
        host.ranks[2].kill()
        assert isinstance(host.hear(), RankEnded)
        host.ranks[3].kill()

    assert host.run(script) == 1
    assert f"eprt: rank 2 (pid {host.ranks[2].pid}) ended: killed by signal 9; host 0 does not end the server" in (
        capfd.readouterr().err
    )
