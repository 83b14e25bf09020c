"""StepWaits: which ranks this rank waited for at the start of its steps, in the header all-gather.

A rank that is late between the MoE layers (attention, sampling, a pause) is late there. Inside a node arrivals are
compared by the clock that its processes share. Between nodes no clocks are compared: all ranks leave an all-gather
together, so a rank that took longer from there to the next one is late by the difference.
"""

import time
from collections.abc import Sequence

import numpy as np

NUM_VALUES = 2  # that a rank puts into its header
_ASLEEP = (-1, -1)


class StepWaits:
    """The waits since the start."""

    def __init__(self, node_of_rank: Sequence[int], rank: int):
        self._rank = rank
        self._same_node_N = np.array(node_of_rank) == node_of_rank[rank]
        self._left_ns = -1  # when the last all-gather ended; -1 after sleep
        self.counting = True  # see CpuBackend.set_counting
        self.wait_us_N = np.zeros(len(node_of_rank))
        self.blocked_us = 0.0  # the longest wait of each all-gather, added up

    def forget_exchange(self) -> None:
        """The next one is not counted: the ranks come to it out of a pause."""
        self._left_ns = -1

    def begin_exchange(self) -> tuple[int, int]:
        """For the header: the time now, and the time since the last exchange; negative after sleep."""
        now_ns = time.monotonic_ns()
        return (now_ns, now_ns - self._left_ns) if self._left_ns >= 0 and self.counting else _ASLEEP

    def end_exchange(self, arrived_ns_N: Sequence[int], took_ns_N: Sequence[int], all_idle: bool) -> None:
        """All ranks' values. all_idle: the ranks fall asleep, and wake one by one, which is not counted as waiting."""
        if min(took_ns_N) >= 0 and len(took_ns_N) > 1:
            of_rank_ns_N = np.where(self._same_node_N, arrived_ns_N, took_ns_N)
            own_ns_N = np.where(self._same_node_N, arrived_ns_N[self._rank], took_ns_N[self._rank])
            wait_us_N = np.maximum(of_rank_ns_N - own_ns_N, 0) / 1e3
            self.wait_us_N += wait_us_N
            self.blocked_us += float(wait_us_N.max())
        self._left_ns = -1 if all_idle or not self.counting else time.monotonic_ns()
