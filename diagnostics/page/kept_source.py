"""KeptSource: the windows that a running server remembers."""

from collections.abc import Sequence
from typing import Any

from ..log.events import WindowRecord
from ..log.recent import RecentWindows
from ..windows.window import Totals, Window
from ..windows.window_sums import WindowSums
from . import expert_view
from .recording import Recording


class KeptSource(Recording):
    """Give it the lines of each window as they come. most_windows: older ones are forgotten."""

    def __init__(self, name: str, num_ranks: int, most_windows: int):
        super().__init__(name, num_ranks, [0] * num_ranks, most_windows=most_windows)
        self.live = True
        self._recent = RecentWindows(most_windows)

    def add(self, records: Sequence[WindowRecord]) -> bool:
        """Lines of any windows; a second line of the same window and rank is ignored. The first tell node_of_rank.
        Whether there was anything new."""
        new = False
        with self.lock:
            if records and not len(self._recent):
                self.node_of_rank = list(records[0].node_of_rank)
            for record in records:
                if self._recent.add(record):
                    new = True
                    self.history.add(record)
            self.history.forget_before(self._recent.oldest)
        if new:
            self.changed()
        return new

    def records(self, number: int) -> list[WindowRecord]:
        with self.lock:
            return self._recent.window(number)

    def link(self, src: int, dst: int) -> dict[str, Any]:
        with self.lock:
            records = self._recent.after(-1)
        if not records:
            raise KeyError(src, dst)
        sums = WindowSums(self.num_ranks, records[0].node_of_rank)
        for record in records:
            sums.add(record)
        return sums.link(src, dst)

    def window(self, number: int | None) -> Window:
        if number is not None:
            records = self.records(number)
            if not records:
                raise LookupError(f"window {number} is not there")
            return Window.of(records)
        totals = Totals(self.num_ranks)
        with self.lock:
            records = self._recent.after(-1)
        for record in records:
            totals.add(record)
        return totals.window()


class ServedSource(KeptSource):
    """Inside a server. replies: of /v1/eprt/load and /v1/eprt/placement, for windows that tell nothing of experts."""

    replies: tuple[Any, Any] = (None, None)

    def outside_experts(self) -> tuple[dict[str, Any] | None, list[str]]:
        try:
            return expert_view.from_replies(*self.replies, "since the start"), []
        except ValueError as error:
            return None, [str(error)]
