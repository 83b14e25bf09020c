"""History: what each rank did in each window, small enough to keep for every window of a long run.

Two views of the waits: `awaited`, how long the others waited for a rank (its column), and `waits`, how long it waited
for the others (its row), both averaged over the other ranks, per call. The line of a late rank may come at any time.
"""

from functools import cached_property, partial
from typing import Any, NamedTuple, Self

import numpy as np

from ..log.events import PER_RANK, WindowRecord
from .medians import median, median_of_known
from .migrations import Migrations
from .spans import SpanTable, WindowSpan
from .view import to_course

SERIES = (
    "awaited",
    "awaited_dispatch",
    "awaited_combine",
    "waits",
    "waits_dispatch",
    "waits_combine",
    "compute",
    "tokens",
    "calls",
)
MOST_COLUMNS = 512  # of a timeline; more windows than that share a column


def most_rows(num_ranks: int) -> int:
    """Windows kept apart, in some 50 MB."""
    return min(4096, max(256, 262_144 // num_ranks))


class HistoryRow(WindowSpan):
    """Averages per call of each window, added up over the windows and, of waits, over the other ranks."""

    def __init__(self, num_ranks: int):
        super().__init__()
        self._sums_8N = np.zeros((8, num_ranks))
        self.columns_2N = self._sums_8N[0:2]  # dispatch, combine: the others for this rank
        self.rows_2N = self._sums_8N[2:4]  # this rank for the others
        self.compute_N, self.tokens_N, self.calls_N = self._sums_8N[4:7]
        self.seen_N = self._sums_8N[7]  # windows that the rank reported
        self.step_us = self.steps = 0.0  # of all ranks that log them, added up

    def add_record(self, record: WindowRecord) -> None:
        super().add_record(record)
        self.__dict__.pop("values_SN", None)
        if record.num_calls == 0:
            return
        rank = record.rank
        waits_2N = record.planes_PN[:2] / record.num_calls
        waits_2N[:, rank] = 0.0  # a rank does not wait for itself
        self.columns_2N += waits_2N
        self.rows_2N[:, rank] += waits_2N.sum(axis=1)
        self.compute_N[rank] += record.compute_us / record.num_calls
        self.tokens_N[rank] += record.planes_PN[PER_RANK.index("recv_tokens")].sum() / record.num_calls
        self.calls_N[rank] += record.num_calls
        self.seen_N[rank] += 1
        if record.usage is not None and "step_us" in record.usage and "steps" in record.usage:
            self.step_us += record.usage["step_us"]
            self.steps += record.usage["steps"]

    def append_span(self, later: Self) -> None:
        super().append_span(later)
        self.__dict__.pop("values_SN", None)
        self._sums_8N += later._sums_8N
        self.step_us += later.step_us
        self.steps += later.steps

    @cached_property  # until a record is added
    def values_SN(self) -> np.ndarray:
        """As in SERIES; NaN where a rank did not report, or nobody could have waited for it."""
        num_ranks = len(self.seen_N)
        waiting_N = self.seen_N.sum() - self.seen_N  # others that reported, in all windows
        columns_2N = np.divide(self.columns_2N, waiting_N, out=np.full((2, num_ranks), np.nan), where=waiting_N > 0)
        per_window_N = 1.0 / np.where(self.seen_N > 0, self.seen_N, np.nan)
        rows_2N = self.rows_2N * per_window_N / max(1, num_ranks - 1)
        per_call_2N = self.compute_N * per_window_N, self.tokens_N * per_window_N
        waits_6N = columns_2N.sum(axis=0), *columns_2N, rows_2N.sum(axis=0), *rows_2N
        return np.stack((*waits_6N, *per_call_2N, self.calls_N))


class Timeline(NamedTuple):
    """C columns, each of one or more windows."""

    first_C: list[int]  # first window
    last_C: list[int]
    values_CN: np.ndarray  # the largest value of the windows in a column


class History:
    """Rows of one or more windows. most_rows: so many are kept apart; None: as many as there are windows."""

    def __init__(self, num_ranks: int, most_rows: int | None = None):
        self.num_ranks = num_ranks
        self.migrations = Migrations()
        self.rows = SpanTable(partial(HistoryRow, num_ranks), most_rows)

    def add_record(self, record: WindowRecord) -> None:
        self.rows.span_of(record.window).add_record(record)
        self.migrations.add_record(record)

    def windows(self) -> list[int]:
        return [window for window, _ in self.rows.items()]

    def table(self) -> dict[str, list]:
        """One entry per row: its window (first and last of several), times, ranks that reported every one, calls of
        the busiest, `step_ms` (null where the log has no steps), and `peak`: how long the most awaited rank is
        awaited, over the median rank (null where there is nothing to compare)."""
        entries = []
        for window, row in self.rows.items():
            awaited_N = row.values_SN[SERIES.index("awaited")]
            usual = median_of_known(awaited_N)
            peak = round(float(np.nanmax(awaited_N)) / usual, 3) if usual > 0 else None
            num_ranks = int((row.seen_N == len(row.windows)).sum())
            step_ms = round(row.step_us / row.steps / 1e3, 3) if row.steps > 0 else None
            times = row.t_start, row.t_end
            entries.append((window, row.windows.last, *times, num_ranks, int(row.calls_N.max()), step_ms, peak))
        names = ("window", "last", "t_start", "t_end", "ranks", "calls", "step_ms", "peak")
        return {name: [entry[k] for entry in entries] for k, name in enumerate(names)}

    def timeline(self, series: str) -> Timeline:
        """KeyError for a series that is none."""
        if series not in SERIES:
            raise KeyError(series)
        first_C, last_C, values_CSN = self._columns()
        return Timeline(first_C, last_C, values_CSN[:, SERIES.index(series)])

    def rank(self, rank: int) -> dict[str, Any]:
        """The course of a rank, beside the median over the ranks. KeyError where there is no such rank."""
        if not 0 <= rank < self.num_ranks:
            raise KeyError(rank)
        first_C, last_C, values_CSN = self._columns()
        return {"rank": rank, **to_course(SERIES, first_C, last_C, values_CSN[:, :, rank], median(values_CSN, 2))}

    def _columns(self) -> tuple[list[int], list[int], np.ndarray]:
        """First and last window of each column, values_CSN."""
        rows = self.rows.items()
        per_column = max(1, -(-len(rows) // MOST_COLUMNS))
        groups = [rows[k : k + per_column] for k in range(0, len(rows), per_column)]
        columns = [np.fmax.reduce([row.values_SN for _, row in group]) for group in groups]
        values_CSN = np.stack(columns) if columns else np.zeros((0, len(SERIES), self.num_ranks))
        return [group[0][0] for group in groups], [group[-1][1].windows.last for group in groups], values_CSN
