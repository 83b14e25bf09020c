"""KeptSource: the windows that a running server remembers."""

from collections.abc import Sequence
from typing import Any

from . import expertview
from .events import WindowRecord
from .recording import Recording
from .window import Totals, Window


class KeptSource(Recording):
    """Give it the lines of each window as they come. most_windows: older ones are forgotten."""

    def __init__(self, name: str, num_ranks: int, most_windows: int):
        super().__init__(name, num_ranks, [0] * num_ranks, most_windows=most_windows)
        self.live = True
        self._most_windows = most_windows
        self._records: dict[int, dict[int, WindowRecord]] = {}  # window -> rank -> line

    def add(self, records: Sequence[WindowRecord]) -> bool:
        """Lines of any windows; a second line of the same window and rank is ignored. The first tell node_of_rank.
        Whether there was anything new."""
        new = False
        with self.lock:
            if records and not self._records:
                self.node_of_rank = list(records[0].node_of_rank)
            for record in records:
                window = self._records.setdefault(record.window, {})
                if record.rank not in window:
                    new, window[record.rank] = True, record
                    self.history.add(record)
            while len(self._records) > self._most_windows:
                del self._records[min(self._records)]
        if new:
            self.changed()
        return new

    def all_records(self) -> list[WindowRecord]:
        with self.lock:
            return [record for _, ranks in sorted(self._records.items()) for _, record in sorted(ranks.items())]

    def records(self, number: int) -> list[WindowRecord]:
        with self.lock:
            return list(self._records.get(number, {}).values())

    def window(self, number: int | None) -> Window:
        if number is not None:
            records = self.records(number)
            if not records:
                raise LookupError(f"window {number} is not there")
            return Window.of(records)
        totals = Totals(self.num_ranks)
        for record in self.all_records():
            totals.add(record)
        return totals.window()


class ServedSource(KeptSource):
    """Inside a server. replies: of /v1/eprt/load and /v1/eprt/placement, for windows that tell nothing of experts."""

    replies: tuple[Any, Any] = (None, None)

    def outside_experts(self) -> tuple[dict[str, Any] | None, list[str]]:
        try:
            return expertview.from_replies(*self.replies, "since the start"), []
        except ValueError as error:
            return None, [str(error)]
