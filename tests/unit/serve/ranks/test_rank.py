"""Rank: what the frontend knows of its process, and can do to it."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from unittest.mock import Mock

import pytest
from eprt.diagnostics.log.standing import Standing

from eprt.serve.ranks.messages import Heartbeat
from eprt.serve.ranks.rank import Rank
from tests.serve.processes import held


@pytest.fixture
def process() -> Iterator[subprocess.Popen]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as running:
        yield running
        running.kill()


def test_a_stopped_process_is_told_from_one_that_sleeps(process):
    rank = Rank(0, process.pid, "host", Mock())
    assert not rank.is_stopped, "nobody watches it"
    rank.watch_process()
    assert not rank.is_stopped
    with held(process.pid):
        assert rank.is_stopped
    rank.kill()
    assert process.wait(200) == -signal.SIGKILL and not rank.is_stopped
    rank.kill()  # twice is fine


def test_a_process_that_has_ended_is_not_taken_for_another(process):
    rank = Rank(0, process.pid, "host", Mock())
    rank.watch_process()
    descriptor = rank.pidfd
    process.kill()
    process.wait(200)
    rank.kill()
    assert rank.pidfd == -1
    with pytest.raises(OSError):
        os.fstat(descriptor)


def test_a_process_of_another_host_is_left_alone():
    rank = Rank(0, 2**22 - 1, "elsewhere", Mock())
    rank.watch_process()
    assert rank.pidfd == -1 and not rank.is_stopped
    rank.kill()


def test_a_rank_stands_where_its_latest_heartbeat_said_and_how_old_that_is(monkeypatch):
    now_s = 100.0
    monkeypatch.setattr("eprt.serve.ranks.rank.time.monotonic", lambda: now_s)
    rank = Rank(0, 1, "elsewhere", Mock(), beat_s=now_s)
    assert rank.standing(103.0) == Standing(3.0), "it has given none yet"
    rank.on_beat(Heartbeat(True, 1.0))
    assert rank.standing(100.5) == Standing(0.5, state="asleep")
    now_s = 100.5
    rank.on_beat(Heartbeat(False, 1.4))
    assert rank.standing(100.5).state == "computes"
    now_s = 101.0
    rank.on_beat(Heartbeat(False, 1.41))
    assert rank.standing(101.0).state == "steps"
    rank.on_beat(Heartbeat(False, 1.42, 3, "combine", 2.0))
    assert rank.standing(101.5) == Standing(0.5, 3, "combine", 2.5)


def test_the_kernel_says_whether_a_process_of_this_host_stands_still(process):
    rank = Rank(0, process.pid, socket.gethostname(), Mock())
    assert rank.process_state() in ("", "disk")
    with held(process.pid):
        assert rank.process_state() == "stopped"
        assert Rank(0, process.pid, "elsewhere", Mock()).process_state() == ""
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert rank.process_state() == "ended"
    process.wait(200)
    assert rank.process_state() == ""


def test_heartbeats_are_due_once_the_rank_has_loaded(monkeypatch):
    """However long it loaded, compiled and warmed up: it gave none meanwhile."""
    now_s = 100.0
    monkeypatch.setattr("eprt.serve.ranks.rank.time.monotonic", lambda: now_s)
    rank = Rank(0, 1, "elsewhere", Mock(), beat_s=now_s)
    now_s += 600.0
    rank.on_loaded(Mock())
    assert rank.standing(now_s) == Standing(0.0)
    assert rank.standing(now_s + 7.0) == Standing(7.0), "it is stuck before its first one"
    rank.on_beat(Heartbeat(asleep=True, cpu_s=1.0))
    assert rank.standing(now_s) == Standing(0.0, state="asleep")
