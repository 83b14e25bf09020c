"""EPStats: what a backend counted since the last reset. The diagnosis log is fed from it."""

from collections.abc import Sequence
from dataclasses import dataclass

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
        blocked_us = [stats.blocked_us for stats in counted if stats.blocked_us is not None]
        return EPStats(
            num_calls=sum(stats.num_calls for stats in counted),
            dispatch_wait_us_N=np.sum([stats.dispatch_wait_us_N for stats in counted], axis=0),
            combine_wait_us_N=np.sum([stats.combine_wait_us_N for stats in counted], axis=0),
            recv_tokens_N=np.sum([stats.recv_tokens_N for stats in counted], axis=0),
            sent_tokens_N=np.sum([stats.sent_tokens_N for stats in counted], axis=0),
            compute_us=sum(stats.compute_us for stats in counted),
            blocked_us=sum(blocked_us) if len(blocked_us) == len(counted) else None,
        )

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
