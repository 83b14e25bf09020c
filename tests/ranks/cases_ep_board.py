"""StepBoard over real processes: cases for test_ep.py."""

import math
import threading
import time

import numpy as np
import pytest

from eprt.ep.api import EPTimeoutError
from eprt.ep.board import StepBoard
from eprt.ep.group import EPGroup


def expected_rows(group: EPGroup, step: int, num_values: int) -> np.ndarray:
    return np.array([[1000 * step + 10 * rank + i for i in range(num_values)] for rank in range(group.size)])


def exchange_many(group: EPGroup, num_steps: int, num_values: int) -> None:
    """Every step shows every rank's values of that very step, also when ranks arrive at different times."""
    board = StepBoard(group, num_values)
    delays = np.random.default_rng(group.rank).random(num_steps)
    for step in range(num_steps):
        if delays[step] < 0.05:
            time.sleep(0.003)
        expected = expected_rows(group, step, num_values)
        np.testing.assert_array_equal(board.exchange(expected[group.rank]), expected)
    board.close()


def two_boards(group: EPGroup) -> None:
    """Boards do not meet each other's flags or messages."""
    first, second = StepBoard(group, 1), StepBoard(group, 3)
    for step in range(20):
        np.testing.assert_array_equal(second.exchange([step, 0, group.rank])[:, 2], np.arange(group.size))
        np.testing.assert_array_equal(first.exchange([step + 7])[:, 0], np.full(group.size, step + 7))


def deadline_names_the_late_rank(group: EPGroup, late: int) -> None:
    board = StepBoard(group, 1, timeout_s=0.2)
    board.exchange([0])
    if group.rank != late:
        with pytest.raises(EPTimeoutError, match=f"for rank {late} in step exchange") as caught:
            board.exchange([1])
        assert (caught.value.rank, caught.value.peer) == (group.rank, late)
        assert (caught.value.seen, caught.value.expected) == (1, 2)
    group.barrier()


def idle_wait_has_no_deadline_and_lets_threads_run(group: EPGroup) -> None:
    board = StepBoard(group, 1, timeout_s=0.2)
    ticks, stop = [], threading.Event()

    def tick():
        while not stop.wait(0.01):
            ticks.append(time.monotonic())

    thread = threading.Thread(target=tick)
    thread.start()
    if group.rank == 0:
        time.sleep(0.6)
    board.exchange([group.rank], timeout_s=math.inf)
    stop.set()
    thread.join()
    assert len(ticks) > 10, f"rank {group.rank}: another thread ran only {len(ticks)} times while this one waited"
    with pytest.raises(ValueError, match="exchange of 2 values on a board of 1"):
        board.exchange([1, 2])
    board.close()
    with pytest.raises(RuntimeError, match="closed"):
        board.exchange([1])


def board_cases(group: EPGroup, num_nodes: int) -> None:
    exchange_many(group, num_steps=300, num_values=5)
    two_boards(group)
    idle_wait_has_no_deadline_and_lets_threads_run(group)
    if group.size > 1 and num_nodes == 1:
        deadline_names_the_late_rank(group, late=group.size - 1)
