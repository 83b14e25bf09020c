"""RecentWindows: the latest windows of a running job, as many as a bound on memory allows."""

from collections.abc import Iterable

from .events import WindowRecord

MOST_VALUES = 4_000_000  # numbers kept, about 130 MB
_FEWEST_WINDOWS = 6


class RecentWindows:
    """most_windows: older ones are forgotten, and so are those that do not fit in most_values numbers."""

    def __init__(self, most_windows: int, most_values: int = MOST_VALUES):
        self._most_windows, self._most_values = most_windows, most_values
        self._windows: dict[int, dict[int, WindowRecord]] = {}  # window -> rank -> line
        self._num_values = 0

    def add(self, record: WindowRecord) -> bool:
        """False for a second line of the same window and rank, and for a window that is older than all that fit."""
        ranks = self._windows.setdefault(record.window, {})
        if record.rank in ranks:
            return False
        ranks[record.rank] = record
        self._num_values += _size(record)
        while self._too_many():
            self._num_values -= sum(map(_size, self._windows.pop(self.oldest).values()))
        return record.window in self._windows

    def _too_many(self) -> bool:
        num_windows = len(self._windows)
        too_large = num_windows > _FEWEST_WINDOWS and self._num_values > self._most_values
        return num_windows > self._most_windows or too_large

    @property
    def oldest(self) -> int:
        """Number of the oldest window; 0 without any."""
        return min(self._windows, default=0)

    def __len__(self) -> int:
        return len(self._windows)

    def window(self, number: int) -> list[WindowRecord]:
        """Its lines; empty where there are none."""
        return list(self._windows.get(number, {}).values())

    def after(self, number: int) -> list[WindowRecord]:
        """The lines of all windows after `number`, by window and rank."""
        return [record for window in sorted(self._windows) if window > number for record in self._sorted(window)]

    def _sorted(self, window: int) -> Iterable[WindowRecord]:
        return (record for _, record in sorted(self._windows[window].items()))


def _size(record: WindowRecord) -> int:
    slots = 0 if record.experts is None else 2 * sum(map(len, record.experts.rows))
    return 4 * record.num_ranks + slots
