"""WindowTotals: the records of one window or of several, added up per link. Knows no files and no detector."""

from collections.abc import Iterable
from typing import Self

import numpy as np

from ..log.events import PER_RANK, WindowRecord
from ..log.reader import LogPlace
from ..log.standing import LoggedProcess, Standing
from ..log.usage import USAGE
from .spans import WindowSpan
from .view import PLANES, WindowView


class WindowTotals(WindowSpan):
    """Totals over all calls. A window without calls has times only: there is nothing to average."""

    def __init__(self, num_ranks: int):
        super().__init__()
        self.planes_PNN = np.zeros((len(PER_RANK), num_ranks, num_ranks))  # [p][i][j]: PER_RANK[p] of rank i with j
        self.compute_us_N = np.zeros(num_ranks)
        self.blocked_us_N = np.zeros(num_ranks)  # NaN where a record does not have it
        self.calls_N = np.zeros(num_ranks)
        self.usage_UN = np.zeros((len(USAGE), num_ranks))  # as USAGE; NaN where a record does not have it
        self.processes: dict[int, LoggedProcess] = {}  # by rank
        # (window, rank) -> where the rank stood at the window's end, and that time
        self.standings: dict[tuple[int, int], tuple[Standing, float]] = {}
        # rank -> the latest window that has expert rows, and where they are
        self.experts: dict[int, tuple[int, WindowRecord | LogPlace]] = {}

    @staticmethod
    def from_records(num_ranks: int, records: Iterable[WindowRecord]) -> "WindowTotals":
        totals = WindowTotals(num_ranks)
        for record in records:
            totals.add_record(record)
        return totals

    def add_record(self, record: WindowRecord, place: LogPlace | None = None) -> None:
        super().add_record(record)
        rank = record.rank
        if record.experts is not None:
            self._keep_latest(rank, record.window, place or record)
        if record.process is not None:
            self.processes[rank] = record.process
        if record.standing is not None:
            self.standings[record.window, rank] = record.standing, record.t_end
        if record.num_calls == 0:
            return
        usage = record.usage or {}
        self.usage_UN[:, rank] += [usage.get(name, np.nan) for name in USAGE]
        self.calls_N[rank] += record.num_calls
        self.compute_us_N[rank] += record.compute_us
        self.blocked_us_N[rank] += np.nan if record.blocked_us is None else record.blocked_us
        self.planes_PNN[:, rank] += record.planes_PN

    def append_span(self, later: Self) -> None:
        super().append_span(later)
        self.planes_PNN += later.planes_PNN
        self.compute_us_N += later.compute_us_N
        self.blocked_us_N += later.blocked_us_N
        self.calls_N += later.calls_N
        self.usage_UN += later.usage_UN
        self.processes |= later.processes
        self.standings |= later.standings
        for rank, (window, experts) in later.experts.items():
            self._keep_latest(rank, window, experts)

    def _keep_latest(self, rank: int, window: int, experts: WindowRecord | LogPlace) -> None:
        if rank not in self.experts or self.experts[rank][0] <= window:
            self.experts[rank] = window, experts

    def view(self, number: int | None) -> WindowView:
        """Per call. number: of the window; None: of all windows together."""
        known_N = np.where(self.calls_N > 0, self.calls_N, np.nan)
        planes_PNN = self.planes_PNN[: len(PLANES)] / known_N[:, None]
        times = (self.t_start, self.t_end) if len(self.windows) else (0.0, 0.0)
        return WindowView(number, *times, planes_PNN, self.compute_us_N / known_N, self.calls_N.copy())
