"""WindowMatrices: the log as arrays, waits per call."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .events import WindowRecord


@dataclass(frozen=True, eq=False)
class WindowMatrices:
    """W windows, N ranks; NaN where a rank has no line for a window, or made no call in it.

    window_W: window numbers. node_of_rank_N: node index of each rank. dispatch_us_WNN, combine_us_WNN: [w][i][j] =
    microseconds rank i waited for rank j per call. recv_tokens_WNN: tokens i received from j per call.
    compute_us_WN: time in the experts per call.
    """

    window_W: np.ndarray
    node_of_rank_N: np.ndarray
    dispatch_us_WNN: np.ndarray
    combine_us_WNN: np.ndarray
    recv_tokens_WNN: np.ndarray
    compute_us_WN: np.ndarray

    @property
    def num_ranks(self) -> int:
        return len(self.node_of_rank_N)

    @property
    def wait_us_WNN(self) -> np.ndarray:
        return self.dispatch_us_WNN + self.combine_us_WNN

    @staticmethod
    def of(records: Sequence[WindowRecord]) -> "WindowMatrices":
        """records: of one job, at least one."""
        if not records:
            raise ValueError("no records")
        window_W = np.unique([record.window for record in records])
        row_of_window = {int(window): w for w, window in enumerate(window_W)}
        num_ranks = records[0].num_ranks
        per_pair = np.full((3, len(window_W), num_ranks, num_ranks), np.nan)
        compute_us_WN = np.full((len(window_W), num_ranks), np.nan)
        for record in records:
            if record.num_calls == 0:
                continue
            w, i = row_of_window[record.window], record.rank
            rows = (record.dispatch_wait_us, record.combine_wait_us, record.recv_tokens)
            per_pair[:, w, i] = np.array(rows, dtype=np.float64) / record.num_calls
            compute_us_WN[w, i] = record.compute_us / record.num_calls
        dispatch_us_WNN, combine_us_WNN, recv_tokens_WNN = per_pair
        node_of_rank_N = np.array(records[0].node_of_rank)
        return WindowMatrices(window_W, node_of_rank_N, dispatch_us_WNN, combine_us_WNN, recv_tokens_WNN, compute_us_WN)
