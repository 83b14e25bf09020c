"""The log's forms of a synthetic job: as WindowMatrices, and as the records that a WindowWriter writes."""

import numpy as np

from ..log.events import WindowRecord
from ..windows.matrices import WindowMatrices
from .job import CALLS, SyntheticJob


def make_matrices(
    job: SyntheticJob,
    dispatch_WNN: np.ndarray,
    combine_WNN: np.ndarray,
    tokens_WNN: np.ndarray,
    compute_WN: np.ndarray,
    blocked_WN: np.ndarray | None = None,
) -> WindowMatrices:
    """From values per call, in microseconds. tokens_WNN: [w][i][j] rank i got from rank j."""
    own = np.eye(job.num_ranks, dtype=bool)
    start_s_W = 1.76e9 + 10.0 * np.arange(job.num_windows)
    return WindowMatrices(
        window_W=np.arange(job.num_windows),
        last_window_W=np.arange(job.num_windows),
        num_windows_W=np.ones(job.num_windows, dtype=np.int64),
        start_s_W=start_s_W,
        end_s_W=start_s_W + 10,
        node_of_rank_N=job.node_of_rank_N,
        dispatch_us_WNN=np.where(own, 0.0, dispatch_WNN),
        combine_us_WNN=np.where(own, 0.0, combine_WNN),
        recv_tokens_WNN=tokens_WNN,
        sent_tokens_WNN=tokens_WNN.transpose(0, 2, 1),
        compute_us_WN=compute_WN,
        calls_WN=np.full(compute_WN.shape, float(CALLS)),
        blocked_us_WN=np.full(compute_WN.shape, np.nan) if blocked_WN is None else blocked_WN,
        experts={},
    )


def records_of(matrices: WindowMatrices) -> list[WindowRecord]:
    """By window, then rank; totals of CALLS calls."""

    def total_us(values_N: np.ndarray) -> list[float]:
        return (values_N * CALLS).round(1).tolist()

    def total_tokens(values_N: np.ndarray) -> list[int]:
        return (values_N * CALLS).astype(int).tolist()

    blocked_us_WN = matrices.blocked_us_WN * CALLS
    return [
        WindowRecord(
            window=int(window),
            t_start=float(matrices.start_s_W[w]),
            t_end=float(matrices.end_s_W[w]),
            rank=rank,
            num_ranks=matrices.num_ranks,
            node_of_rank=tuple(matrices.node_of_rank_N.tolist()),
            num_calls=CALLS,
            dispatch_wait_us=tuple(total_us(matrices.dispatch_us_WNN[w, rank])),
            combine_wait_us=tuple(total_us(matrices.combine_us_WNN[w, rank])),
            recv_tokens=tuple(total_tokens(matrices.recv_tokens_WNN[w, rank])),
            compute_us=float(matrices.compute_us_WN[w, rank] * CALLS),
            sent_tokens=tuple(total_tokens(matrices.sent_tokens_WNN[w, rank])),
            blocked_us=None if np.isnan(blocked_us_WN[w, rank]) else float(blocked_us_WN[w, rank]),
        )
        for w, window in enumerate(matrices.window_W)
        for rank in range(matrices.num_ranks)
    ]
