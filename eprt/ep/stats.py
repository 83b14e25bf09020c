"""EPStats: what a backend counted since the last reset. The diagnosis log is fed from it."""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np


@dataclass(frozen=True)
class EPStats:
    """Totals of this rank. N ranks."""

    num_calls: int  # dispatches begun
    dispatch_wait_us_N: np.ndarray  # float64: how long after this rank began to wait rank j's tokens were there, or 0
    combine_wait_us_N: np.ndarray  # the same for rank j's outputs
    # int64: tokens from and to each rank, this one included; a token that takes several slots of a rank counts once.
    recv_tokens_N: np.ndarray
    sent_tokens_N: np.ndarray
    compute_us: float  # between dispatch_recv and combine_send, that is in the routed experts
    # Until the last rank's tokens, and the last one's outputs, were there, call by call; None: not counted.
    blocked_us: float | None = None

    @staticmethod
    def total(counted: Sequence["EPStats"]) -> "EPStats":
        """Of several backends of this rank, at least one."""
        total = {}
        for field in fields(EPStats):
            values = [getattr(stats, field.name) for stats in counted]
            total[field.name] = None if any(value is None for value in values) else sum(values)
        return EPStats(**total)

    @staticmethod
    def unpack(totals: np.ndarray, num_ranks: int) -> "EPStats":
        """From the native library's int64 totals (times in ns): four rows of N, then calls, compute, blocked."""
        dispatch_ns, combine_ns, recv, sent = totals[: 4 * num_ranks].reshape(4, num_ranks)
        num_calls, compute_ns, blocked_ns = totals[4 * num_ranks :].tolist()
        return EPStats(
            num_calls=num_calls,
            dispatch_wait_us_N=dispatch_ns / 1e3,
            combine_wait_us_N=combine_ns / 1e3,
            recv_tokens_N=recv.copy(),
            sent_tokens_N=sent.copy(),
            compute_us=compute_ns / 1e3,
            blocked_us=blocked_ns / 1e3,
        )
