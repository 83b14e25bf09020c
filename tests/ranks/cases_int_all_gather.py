"""IntAllGather over real processes: cases for test_ep.py."""

import math
import threading
import time
from unittest.mock import patch

import numpy as np
import pytest

from eprt.ep.errors import EPTimeoutError
from eprt.ep.group import wait
from eprt.ep.group.group import EPGroup
from eprt.ep.group.int_all_gather import IntAllGather
from tests.ranks.moments import PATIENCE_S, Clock, Moments


def expected_rows(group: EPGroup, step: int, num_values: int) -> np.ndarray:
    return np.array([[1000 * step + 10 * rank + i for i in range(num_values)] for rank in range(group.size)])


def exchange_many(group: EPGroup, num_steps: int, num_values: int) -> None:
    """Every step shows every rank's values of that very step, also when ranks arrive at different times."""
    gather = IntAllGather(group, num_values)
    delays = np.random.default_rng(group.rank).random(num_steps)
    for step in range(num_steps):
        if delays[step] < 0.05:
            time.sleep(0.003)
        expected = expected_rows(group, step, num_values)
        np.testing.assert_array_equal(gather.all_gather(expected[group.rank]), expected)
    gather.close()


def two_boards(group: EPGroup) -> None:
    """Boards do not meet each other's flags or messages."""
    first, second = IntAllGather(group, 1), IntAllGather(group, 3)
    for step in range(20):
        np.testing.assert_array_equal(second.all_gather([step, 0, group.rank])[:, 2], np.arange(group.size))
        np.testing.assert_array_equal(first.all_gather([step + 7])[:, 0], np.full(group.size, step + 7))


def deadline_names_the_late_rank(group: EPGroup, late: int) -> None:
    """The deadline passes when the ranks that are not late are there."""
    gather = IntAllGather(group, 1, timeout_s=0.2)
    gather.all_gather([0], timeout_s=PATIENCE_S)
    if group.rank != late:
        flags = [flag for rank, flag in zip(group.local_ranks, gather._row_flags.tolist()) if rank != late]
        clock = Clock(lambda: all(gather._ops.ep_flag_epoch(flag) == 2 for flag in flags))
        with (
            patch.object(wait, "time", clock),
            pytest.raises(EPTimeoutError, match=f"for rank {late} in header all-gather") as caught,
        ):
            gather.all_gather([1])
        assert (caught.value.rank, caught.value.peer) == (group.rank, late)
        assert (caught.value.seen, caught.value.expected) == (1, 2)
    group.barrier()


def idle_wait_has_no_deadline_and_lets_threads_run(group: EPGroup) -> None:
    """Rank 0 comes when a thread of every other rank has run a while beside its waiting."""
    gather, moments, stop = IntAllGather(group, 1, timeout_s=0.2), Moments(group), threading.Event()

    def tick():
        num_ticks = 0
        while not stop.wait(0.01):
            num_ticks += 1
            if num_ticks == 30:  # beyond the gather's own deadline
                moments.tell("ticks")

    with moments.told_in_a_wait("waiting"):
        thread = threading.Thread(target=tick)
        thread.start()
        if group.rank == 0:
            moments.wait("waiting", range(1, group.size))
            moments.wait("ticks", range(1, group.size))
        gather.all_gather([group.rank], timeout_s=math.inf)
    stop.set()
    thread.join()
    moments.close()
    with pytest.raises(ValueError, match="all_gather of 2 values, made for 1"):
        gather.all_gather([1, 2])
    gather.close()
    with pytest.raises(RuntimeError, match="closed"):
        gather.all_gather([1])


def int_all_gather_cases(group: EPGroup, num_nodes: int) -> None:
    exchange_many(group, num_steps=300, num_values=5)
    two_boards(group)
    idle_wait_has_no_deadline_and_lets_threads_run(group)
    if group.size > 1 and num_nodes == 1:
        deadline_names_the_late_rank(group, late=group.size - 1)
