"""EPStats: what a backend counted since the last reset. The diagnosis log and the load of experts are fed from it."""

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
