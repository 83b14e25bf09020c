"""Rank: what the frontend knows of its process, and can do to it."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from unittest.mock import Mock

import pytest

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
    assert process.wait(60) == -signal.SIGKILL and not rank.is_stopped
    rank.kill()  # twice is fine


def test_a_process_that_has_ended_is_not_taken_for_another(process):
    rank = Rank(0, process.pid, "host", Mock())
    rank.watch_process()
    descriptor = rank.pidfd
    process.kill()
    process.wait(60)
    rank.kill()
    assert rank.pidfd == -1
    with pytest.raises(OSError):
        os.fstat(descriptor)


def test_a_process_of_another_host_is_left_alone():
    rank = Rank(0, 2**22 - 1, "elsewhere", Mock())
    rank.watch_process()
    assert rank.pidfd == -1 and not rank.is_stopped
    rank.kill()
