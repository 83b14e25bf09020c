"""EPStats: what a backend counted since the last reset. The diagnosis log and the load of experts are fed from it."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class EPStats:
    """Totals of this rank. N ranks, E slots of this rank.

    num_calls: dispatches begun.
    dispatch_wait_us_N: float64, how long after this rank began to wait rank j's tokens were there (0 if before).
    combine_wait_us_N: the same for rank j's outputs.
    recv_tokens_N, sent_tokens_N: int64, tokens from and to each rank, this one included; a token that takes several
        slots of a rank counts once.
    slot_rows_E: int64, rows each slot was given: its load.
    blocked_us: until the last rank's tokens, and the last one's outputs, were there, call by call; None: not counted.
    compute_us: time between dispatch_recv and combine_send, that is the routed experts.
    """

    num_calls: int
    dispatch_wait_us_N: np.ndarray
    combine_wait_us_N: np.ndarray
    recv_tokens_N: np.ndarray
    sent_tokens_N: np.ndarray
    slot_rows_E: np.ndarray
    compute_us: float
    blocked_us: float | None = None

    @staticmethod
    def total(counted: Sequence["EPStats"]) -> "EPStats":
        """Of several backends of this rank, at least one; slot_rows_E: one backend's after the other's."""
        blocked_us = [stats.blocked_us for stats in counted if stats.blocked_us is not None]

        def summed(name: str) -> np.ndarray:
            return np.sum([getattr(stats, name) for stats in counted], axis=0)

        return EPStats(
            num_calls=sum(stats.num_calls for stats in counted),
            dispatch_wait_us_N=summed("dispatch_wait_us_N"),
            combine_wait_us_N=summed("combine_wait_us_N"),
            recv_tokens_N=summed("recv_tokens_N"),
            sent_tokens_N=summed("sent_tokens_N"),
            slot_rows_E=np.concatenate([stats.slot_rows_E for stats in counted]),
            compute_us=sum(stats.compute_us for stats in counted),
            blocked_us=sum(blocked_us) if len(blocked_us) == len(counted) else None,
        )

    @staticmethod
    def unpack(totals: np.ndarray, num_ranks: int) -> "EPStats":
        """From the native library's int64 totals (times in ns): four rows of N, one of E, calls, compute, blocked."""
        dispatch_ns, combine_ns, recv, sent = totals[: 4 * num_ranks].reshape(4, num_ranks)
        return EPStats(
            num_calls=int(totals[-3]),
            dispatch_wait_us_N=dispatch_ns / 1e3,
            combine_wait_us_N=combine_ns / 1e3,
            recv_tokens_N=recv.copy(),
            sent_tokens_N=sent.copy(),
            slot_rows_E=totals[4 * num_ranks : -3].copy(),
            compute_us=float(totals[-2]) / 1e3,
            blocked_us=float(totals[-1]) / 1e3,
        )
