"""StepWaits: for whom this rank waited at the start of its steps, where all ranks show each other their headers.

A rank that is late between the MoE layers (attention, sampling, a pause) is late there. No clocks are compared:
all ranks leave an exchange together, so who took longer from there to the next one is late by the difference.
"""

import time
from collections.abc import Sequence

import numpy as np

_ASLEEP = -1


class StepWaits:
    """wait_us_N: float64, since the start. blocked_us: the longest of each exchange, added up. counting: see
    CpuBackend.set_counting."""

    def __init__(self, num_ranks: int, rank: int):
        self._rank = rank
        self._left_ns = _ASLEEP
        self.counting = True
        self.wait_us_N = np.zeros(num_ranks)
        self.blocked_us = 0.0

    def arrive(self) -> int:
        """Nanoseconds since the last exchange, to be shown to the others; negative after sleep."""
        return time.perf_counter_ns() - self._left_ns if self._left_ns >= 0 and self.counting else _ASLEEP

    def leave(self, took_ns_N: Sequence[int], all_idle: bool) -> None:
        """took_ns_N: what everybody showed. all_idle: the ranks fall asleep and wake one by one, for which none is to
        blame."""
        if min(took_ns_N) >= 0 and len(took_ns_N) > 1:
            wait_us_N = np.maximum(np.array(took_ns_N) - took_ns_N[self._rank], 0) / 1e3
            self.wait_us_N += wait_us_N
            self.blocked_us += float(wait_us_N.max())
        self._left_ns = _ASLEEP if all_idle or not self.counting else time.perf_counter_ns()
