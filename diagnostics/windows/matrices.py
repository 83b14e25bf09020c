"""WindowMatrices: the log as arrays, waits per call."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields

import numpy as np

from ..log.events import ExpertRows, WindowRecord

_NONE = np.zeros(0, dtype=np.int64)


@dataclass(frozen=True, eq=False)
class WindowMatrices:
    """W windows, N ranks; NaN where a rank has no line for a window, or made no call in it.

    window_W: window numbers. start_s_W, end_s_W: Unix time. node_of_rank_N: node index of each rank.
    dispatch_us_WNN, combine_us_WNN: [w][i][j] = microseconds rank i waited for rank j per call. recv_tokens_WNN: tokens
    i received from j per call; sent_tokens_WNN: tokens i sent to j. compute_us_WN: time in the experts per call.
    calls_WN: number of calls.
    experts: (w, rank) -> what returns the load of that rank's expert slots, where the log tells; None when it is gone.
    blocked_us_WN: how long a rank waited at all per call, until the last one's data were there; NaN where not logged.
    A very long log is thinned: an entry then stands for num_windows_W windows, window_W to last_window_W.
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
    experts: dict[tuple[int, int], Callable[[], ExpertRows | None]]
    last_window_W: np.ndarray = field(default_factory=lambda: _NONE)
    num_windows_W: np.ndarray = field(default_factory=lambda: _NONE)
    blocked_us_WN: np.ndarray = field(default_factory=lambda: _NONE)

    def __post_init__(self):
        if not len(self.last_window_W):
            object.__setattr__(self, "last_window_W", self.window_W)
            object.__setattr__(self, "num_windows_W", np.ones(len(self.window_W), dtype=np.int64))
        if self.blocked_us_WN.shape != self.calls_WN.shape:
            object.__setattr__(self, "blocked_us_WN", np.full(self.calls_WN.shape, np.nan))

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
        """records: of one job, at least one; of the same window and rank only the last counts."""
        from .window_sums import WindowSums

        if not records:
            raise ValueError("no records")
        sums = WindowSums(records[0].num_ranks, records[0].node_of_rank)
        for record in {(record.window, record.rank): record for record in records}.values():
            sums.add(record)
        return sums.matrices()
