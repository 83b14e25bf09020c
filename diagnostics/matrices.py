"""WindowMatrices: the log as arrays, waits per call."""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from .events import ExpertRows, WindowRecord


@dataclass(frozen=True, eq=False)
class WindowMatrices:
    """W windows, N ranks; NaN where a rank has no line for a window, or made no call in it.

    window_W: window numbers. start_s_W, end_s_W: Unix time. node_of_rank_N: node index of each rank.
    dispatch_us_WNN, combine_us_WNN: [w][i][j] = microseconds rank i waited for rank j per call. recv_tokens_WNN: tokens
    i received from j per call; sent_tokens_WNN: tokens i sent to j. compute_us_WN: time in the experts per call.
    calls_WN: number of calls.
    experts: (w, rank) -> load of that rank's expert slots, where the log tells.
    """

    window_W: np.ndarray
    start_s_W: np.ndarray
    end_s_W: np.ndarray
    node_of_rank_N: np.ndarray
    dispatch_us_WNN: np.ndarray
    combine_us_WNN: np.ndarray
    recv_tokens_WNN: np.ndarray
    sent_tokens_WNN: np.ndarray
    compute_us_WN: np.ndarray
    calls_WN: np.ndarray
    experts: dict[tuple[int, int], ExpertRows]

    @property
    def num_ranks(self) -> int:
        return len(self.node_of_rank_N)

    @property
    def wait_us_WNN(self) -> np.ndarray:
        return self.dispatch_us_WNN + self.combine_us_WNN

    def first(self, num_windows: int) -> "WindowMatrices":
        """The same job, seen when only so many windows had passed."""
        parts = {field.name: getattr(self, field.name) for field in fields(self)}
        cut = {name: value[:num_windows] for name, value in parts.items() if name not in ("node_of_rank_N", "experts")}
        return WindowMatrices(**{**parts, **cut})

    @staticmethod
    def of(records: Sequence[WindowRecord]) -> "WindowMatrices":
        """records: of one job, at least one."""
        if not records:
            raise ValueError("no records")
        window_W = np.unique([record.window for record in records])
        row_of_window = {int(window): w for w, window in enumerate(window_W)}
        num_windows, num_ranks = len(window_W), records[0].num_ranks
        per_pair = np.full((4, num_windows, num_ranks, num_ranks), np.nan)
        compute_us_WN = np.full((num_windows, num_ranks), np.nan)
        calls_WN = np.zeros((num_windows, num_ranks))
        start_s_W, end_s_W = np.full(num_windows, np.inf), np.full(num_windows, -np.inf)
        experts = {}
        for record in records:
            w, i = row_of_window[record.window], record.rank
            start_s_W[w], end_s_W[w] = min(start_s_W[w], record.t_start), max(end_s_W[w], record.t_end)
            calls_WN[w, i] = record.num_calls
            if record.experts is not None:
                experts[w, i] = record.experts
            if record.num_calls == 0:
                continue
            rows = (record.dispatch_wait_us, record.combine_wait_us, record.recv_tokens, record.sent_tokens)
            per_pair[:, w, i] = np.array(rows, dtype=np.float64) / record.num_calls
            compute_us_WN[w, i] = record.compute_us / record.num_calls
        dispatch_us, combine_us, recv_tokens, sent_tokens = per_pair
        node_of_rank_N = np.array(records[0].node_of_rank)
        return WindowMatrices(
            window_W, start_s_W, end_s_W, node_of_rank_N, dispatch_us, combine_us, recv_tokens, sent_tokens,
            compute_us_WN, calls_WN, experts,
        )  # fmt: skip
