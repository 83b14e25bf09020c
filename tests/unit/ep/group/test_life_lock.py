"""LifeLock: the end of a process shows in shared memory, however it ends, and before its sockets close."""

import mmap
import os
import signal
import subprocess
import sys

import numpy as np
import pytest

from eprt.ep.group import life_lock
from tests.serve.processes import wait_until

HOLD = """
import mmap, sys, numpy as np
from eprt.ep.group import life_lock
memory = np.frombuffer(mmap.mmap(int(sys.argv[1]), 4096), dtype=np.uint8)
life_lock.hold(memory[64 : 64 + life_lock.NUM_BYTES])
print("holds", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def shared():
    fd = os.memfd_create("test")
    os.ftruncate(fd, 4096)
    yield fd, np.frombuffer(mmap.mmap(fd, 4096), dtype=np.uint8)
    os.close(fd)


def has_died(memory: np.ndarray) -> bool:
    return bool(life_lock.died(memory[64:].view(np.int32)[:1])[0])


def holder(fd: int) -> subprocess.Popen:
    pipe = subprocess.PIPE
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(fd)], pass_fds=[fd], stdin=pipe, stdout=pipe)
    assert process.stdout is not None and process.stdout.readline() == b"holds\n"
    return process


def test_a_killed_process_shows_and_its_successor_takes_over(shared):
    fd, memory = shared
    with holder(fd) as first:
        assert not has_died(memory)
        first.send_signal(signal.SIGKILL)
        wait_until(lambda: has_died(memory), "the mark")
        first.wait()
    with holder(fd) as second:
        assert not has_died(memory), "the next one holds it"
        assert second.stdin is not None
        second.stdin.close()
        second.wait()
    assert has_died(memory), "a process that ends by itself ends too"


def test_a_lock_that_was_released_says_nothing(shared):
    _, memory = shared
    locks = [memory[at : at + life_lock.NUM_BYTES] for at in (0, 64, 128)]
    for lock in locks:
        life_lock.hold(lock)
    for lock in locks:
        assert lock.view(np.int32)[0] != 0
        life_lock.release(lock)
        life_lock.release(lock)  # twice is fine
        assert lock.view(np.int32)[0] == 0
