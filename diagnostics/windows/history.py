"""History: what each rank did in each window, small enough to keep for every window of a long run.

Everything is kept as sums, so that the line of a late rank may come at any time, and in a very long run 2, 4, 8 ...
windows with consecutive numbers become one. Two views of the waits: `awaited`, how long the others waited for a rank
(its column), and `waits`, how long it waited for the others (its row), both averaged over the other ranks, per call.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..log.events import WindowRecord
from ..page.expert_view import Migrations

SERIES = (
    "awaited", "awaited_dispatch", "awaited_combine", "waits", "waits_dispatch", "waits_combine", "compute", "tokens",
    "calls",
)  # fmt: skip
MOST_COLUMNS = 512  # of a timeline; more windows than that share a column


def most_rows(num_ranks: int) -> int:
    """Windows kept apart, in some 50 MB."""
    return min(4096, max(256, 262_144 // num_ranks))


class _Row:
    """One window or several. Sums over windows and other ranks: columns_2N, rows_2N (dispatch, combine).

    seen_N: windows that the rank reported. windows: bit k, window first + k was seen.
    """

    def __init__(self, num_ranks: int):
        self.t_start, self.t_end, self.windows = np.inf, -np.inf, 0
        self.columns_2N, self.rows_2N = np.zeros((2, num_ranks)), np.zeros((2, num_ranks))
        self.compute_N, self.tokens_N, self.calls_N = (np.zeros(num_ranks) for _ in range(3))
        self.seen_N = np.zeros(num_ranks, dtype=np.int64)

    def add(self, record: WindowRecord, bit: int) -> None:
        self.windows |= 1 << bit
        self.t_start, self.t_end = min(self.t_start, record.t_start), max(self.t_end, record.t_end)
        if record.num_calls == 0:
            return
        rank = record.rank
        waits_2N = np.array((record.dispatch_wait_us, record.combine_wait_us)) / record.num_calls
        waits_2N[:, rank] = 0.0  # a rank does not wait for itself
        self.columns_2N += waits_2N
        self.rows_2N[:, rank] += waits_2N.sum(axis=1)
        self.compute_N[rank] += record.compute_us / record.num_calls
        self.tokens_N[rank] += sum(record.recv_tokens) / record.num_calls
        self.calls_N[rank] += record.num_calls
        self.seen_N[rank] += 1

    def merge(self, later: "_Row", shift: int) -> None:
        self.windows |= later.windows << shift
        self.t_start, self.t_end = min(self.t_start, later.t_start), max(self.t_end, later.t_end)
        for name in ("columns_2N", "rows_2N", "compute_N", "tokens_N", "calls_N", "seen_N"):
            getattr(self, name)[...] += getattr(later, name)

    def values(self) -> np.ndarray:
        """[series, N] as in SERIES; NaN where a rank did not report, or nobody could have waited for it."""
        num_ranks = len(self.seen_N)
        waiting_N = self.seen_N.sum() - self.seen_N  # others that reported, in all windows
        columns_2N = np.divide(self.columns_2N, waiting_N, out=np.full((2, num_ranks), np.nan), where=waiting_N > 0)
        per_window = 1.0 / np.where(self.seen_N > 0, self.seen_N, np.nan)
        rows_2N = self.rows_2N * per_window / max(1, num_ranks - 1)
        return np.stack((
            columns_2N.sum(axis=0), *columns_2N, rows_2N.sum(axis=0), *rows_2N,
            self.compute_N * per_window, self.tokens_N * per_window, self.calls_N,
        ))  # fmt: skip


class Timeline(NamedTuple):
    """C columns of one or more windows. values_CN: the largest value of the windows in a column."""

    first_C: list[int]
    last_C: list[int]
    values_CN: np.ndarray


class History:
    """most_windows: older ones are forgotten. most_rows: so many are kept apart; None: all. per_row: windows in a row.

    Windows go by the number of the first that could be in their row.
    """

    def __init__(self, num_ranks: int, most_windows: int | None = None, most_rows: int | None = None):
        self.num_ranks, self.per_row = num_ranks, 1
        self._most_windows, self._most_rows = most_windows, most_rows
        self.migrations = Migrations()
        self._rows: dict[int, _Row] = {}  # by the first window number
        self._values: dict[int, np.ndarray] = {}  # of rows that have not changed since

    def add(self, record: WindowRecord) -> None:
        number = self._row_of(record.window)
        if number not in self._rows:
            self._rows[number] = _Row(self.num_ranks)
            if self._most_windows and len(self._rows) > self._most_windows:
                self.forget_before(min(self._rows) + 1)
            while self._most_rows and len(self._rows) > self._most_rows:
                self._halve()
            number = self._row_of(record.window)
        if number in self._rows:
            self._rows[number].add(record, record.window - number)
        self.migrations.add(record)
        self._values.pop(number, None)

    def _row_of(self, window: int) -> int:
        return window - window % self.per_row

    def _halve(self) -> None:
        before, self._rows, self._values = self._rows, {}, {}
        self.per_row *= 2
        for number in sorted(before):
            merged = self._rows.setdefault(self._row_of(number), _Row(self.num_ranks))
            merged.merge(before[number], number % self.per_row)

    def forget_before(self, window: int) -> None:
        for old in [number for number in self._rows if number < window]:
            del self._rows[old]
            self._values.pop(old, None)

    def windows(self) -> list[int]:
        return sorted(self._rows)

    def table(self) -> dict[str, list]:
        """One entry per window: its number (first and last of several), times, ranks that reported every one, calls of
        the busiest, and `peak`: how long the most awaited rank is awaited, over the median rank (null where there is
        nothing to compare)."""
        names = ("window", "last", "t_start", "t_end", "ranks", "calls", "peak")
        columns: dict[str, list] = {name: [] for name in names}
        for window in self.windows():
            row, values = self._rows[window], self._window_values(window)
            awaited_N = values[SERIES.index("awaited")]
            known = awaited_N[np.isfinite(awaited_N)]
            usual = float(np.median(known)) if len(known) else 0.0
            peak = round(float(known.max()) / usual, 3) if usual > 0 else None
            num_ranks = int((row.seen_N == row.windows.bit_count()).sum())
            last = window + row.windows.bit_length() - 1
            entry = (window, last, row.t_start, row.t_end, num_ranks, int(row.calls_N.max()), peak)
            for name, value in zip(columns, entry):
                columns[name].append(value)
        return columns

    def timeline(self, series: str, most_columns: int = MOST_COLUMNS) -> Timeline:
        """KeyError for a series that is none."""
        if series not in SERIES:
            raise KeyError(series)
        first, last, values_CSN = self._columns(most_columns)
        return Timeline(first, last, values_CSN[:, SERIES.index(series)])

    def rank(self, rank: int, most_columns: int = MOST_COLUMNS) -> dict:
        """All series of one rank, and the median over the ranks of each. KeyError where there is no such rank."""
        if not 0 <= rank < self.num_ranks:
            raise KeyError(rank)
        first, last, values_CSN = self._columns(most_columns)
        usual_CS = _median(values_CSN)
        return {
            "rank": rank,
            "first": first,
            "last": last,
            "series": {name: plain(values_CSN[:, s, rank]) for s, name in enumerate(SERIES)},
            "usual": {name: plain(usual_CS[:, s]) for s, name in enumerate(SERIES)},
        }

    def _columns(self, most_columns: int) -> tuple[list[int], list[int], np.ndarray]:
        """First and last window of each column, values_CSN."""
        windows = self.windows()
        per_column = max(1, -(-len(windows) // most_columns))
        groups = [windows[k : k + per_column] for k in range(0, len(windows), per_column)]
        columns = [np.fmax.reduce([self._window_values(w) for w in group]) for group in groups]
        values_CSN = np.stack(columns) if columns else np.zeros((0, len(SERIES), self.num_ranks))
        last = [group[-1] + self._rows[group[-1]].windows.bit_length() - 1 for group in groups]
        return [group[0] for group in groups], last, values_CSN

    def _window_values(self, window: int) -> np.ndarray:
        if window not in self._values:
            self._values[window] = self._rows[window].values()
        return self._values[window]


def _median(values_CSN: np.ndarray) -> np.ndarray:
    out = np.full(values_CSN.shape[:2], np.nan)
    known = np.isfinite(values_CSN).any(axis=2)
    out[known] = np.nanmedian(values_CSN[known], axis=1)
    return out


def plain(values: Sequence[float] | np.ndarray) -> list[float | None]:
    """For JSON, which has no NaN."""
    return [round(float(v), 4) if np.isfinite(v) else None for v in values]
