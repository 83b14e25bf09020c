"""WindowMatrices: the log as arrays, waits per call. Knows nothing of lines, and does not judge."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields

import numpy as np

from ..log.events import WindowRecord
from ..log.reader import LogPlace
from ..log.standing import LoggedProcess, Standing


@dataclass(frozen=True, eq=False)
class WindowMatrices:
    """W entries, each of one window or, where a very long log was thinned, of several; N ranks.

    NaN where a rank has no line for a window, or made no call in it.
    """

    window_W: np.ndarray  # window number; of several windows the first
    last_window_W: np.ndarray  # of several windows the last
    num_windows_W: np.ndarray  # windows in the entry
    start_s_W: np.ndarray  # Unix time
    end_s_W: np.ndarray
    node_of_rank_N: np.ndarray  # node index of each rank
    dispatch_us_WNN: np.ndarray  # [w][i][j]: microseconds per call that rank i waited for rank j's dispatch
    combine_us_WNN: np.ndarray  # the same for its combine
    recv_tokens_WNN: np.ndarray  # tokens per call that rank i received from rank j
    sent_tokens_WNN: np.ndarray  # tokens per call that rank i sent to rank j
    compute_us_WN: np.ndarray  # time in the experts per call
    calls_WN: np.ndarray  # number of dispatch + combine pairs
    blocked_us_WN: np.ndarray  # time per call that a rank waited at all; NaN also where it is not logged
    # (w, rank) -> whose `experts` is the load of that rank's expert slots, where it is logged
    experts: dict[tuple[int, int], WindowRecord | LogPlace]
    # Per call, of those of usage.USAGE that any rank has logged: NaN where a rank has not.
    usage_WN: Mapping[str, np.ndarray] = field(default_factory=dict)
    processes: Mapping[int, LoggedProcess] = field(default_factory=dict)  # by rank, as far as they are logged
    # (window, rank) -> where the rank stood at the window's end, and that time; of windows with a hang.
    standings: Mapping[tuple[int, int], tuple[Standing, float]] = field(default_factory=dict)

    @property
    def num_ranks(self) -> int:
        return len(self.node_of_rank_N)

    @property
    def wait_us_WNN(self) -> np.ndarray:
        return self.dispatch_us_WNN + self.combine_us_WNN

    @property
    def mean_wait_us_NN(self) -> np.ndarray:
        """Over all windows together: total time over total calls."""
        calls_N = self.calls_WN.sum(axis=0)
        total_us_NN = np.nansum(self.wait_us_WNN * self.calls_WN[:, :, None], axis=0)
        return total_us_NN / np.where(calls_N > 0, calls_N, np.nan)[:, None]

    def first(self, num_windows: int) -> "WindowMatrices":
        """The same job, seen when only so many windows had passed."""
        parts = {field.name: getattr(self, field.name) for field in fields(self)}
        whole = ("node_of_rank_N", "experts", "usage_WN", "processes", "standings")
        cut = {name: value[:num_windows] for name, value in parts.items() if name not in whole}
        usage_WN = {name: value_WN[:num_windows] for name, value_WN in self.usage_WN.items()}
        last = max(cut["last_window_W"], default=-1)
        standings = {place: stood for place, stood in self.standings.items() if place[0] <= last}
        return WindowMatrices(**{**parts, **cut, "usage_WN": usage_WN, "standings": standings})
