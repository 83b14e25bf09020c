"""KeptSource: a recording of the windows that a running server remembers. Is given its records; fetches none."""

from collections.abc import Sequence
from typing import Any

from ..log.events import WindowRecord
from ..log.recent import RecentWindows
from ..windows.matrices import WindowMatrices
from ..windows.totals import WindowTotals
from ..windows.view import WindowView
from ..windows.window_sums import WindowSums, most_kept
from .recording import Recording


class KeptSource(Recording):
    """Records in memory. most_windows: older ones are forgotten."""

    def __init__(self, name: str, num_ranks: int, most_windows: int):
        super().__init__(name, num_ranks, [0] * num_ranks)
        self.live = True
        self._recent = RecentWindows(most_windows)

    def add_records(self, records: Sequence[WindowRecord]) -> bool:
        """Whether there was anything new. The first record tells node_of_rank."""
        new = False
        with self.lock:
            if records and not len(self._recent):
                self.node_of_rank = list(records[0].node_of_rank)
            for record in records:
                if self._recent.add_record(record):
                    new = True
                    self.history.add_record(record)
            self.history.rows.forget_before(self._recent.oldest)
        if new:
            self.mark_changed()
        return new

    def window(self, number: int | None) -> WindowView:
        records = self._all_records() if number is None else self.records(number)
        if number is not None and not records:
            raise LookupError(f"window {number} is not there")
        return WindowTotals.from_records(self.num_ranks, records).view(number)

    def records(self, window: int) -> list[WindowRecord]:
        with self.lock:
            return self._recent.records_of(window)

    def link(self, src: int, dst: int) -> dict[str, Any]:
        records = self._all_records()
        if not records:
            raise KeyError(src, dst)
        return WindowSums.from_records(records).link(src, dst)

    def matrices(self) -> WindowMatrices:
        sums = WindowSums(self.num_ranks, most_kept(self.num_ranks))
        for record in self._all_records():
            sums.add_record(record)
        return sums.matrices()

    def _all_records(self) -> list[WindowRecord]:
        with self.lock:
            return self._recent.records_after(-1)
