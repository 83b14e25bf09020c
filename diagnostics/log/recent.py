"""RecentWindows: the latest windows of a running job, as many as a bound on memory allows. Knows no files."""

from .events import WindowRecord

MOST_VALUES = 4_000_000  # numbers kept, about 130 MB
_FEWEST_WINDOWS = 6


class RecentWindows:
    """Records by window and rank. most_values: numbers kept, or as many as the newest few windows have."""

    def __init__(self, most_windows: int, most_values: int = MOST_VALUES):
        self._most_windows, self._most_values = most_windows, most_values
        self._windows: dict[int, dict[int, WindowRecord]] = {}  # window -> rank -> record
        self._num_values = 0

    def add_record(self, record: WindowRecord) -> bool:
        """False for a second record of the same window and rank, and for a window that is older than all that fit."""
        ranks = self._windows.setdefault(record.window, {})
        if record.rank in ranks:
            return False
        ranks[record.rank] = record
        self._num_values += _size(record)
        while len(self._windows) > self._most_windows or (
            len(self._windows) > _FEWEST_WINDOWS and self._num_values > self._most_values
        ):
            self._num_values -= sum(map(_size, self._windows.pop(self.oldest).values()))
        return record.window in self._windows

    @property
    def oldest(self) -> int:
        """Number of the oldest window; 0 without any."""
        return min(self._windows, default=0)

    def __len__(self) -> int:
        return len(self._windows)

    def records_of(self, window: int) -> list[WindowRecord]:
        """By rank; empty where there are none."""
        return [record for _, record in sorted(self._windows.get(window, {}).items())]

    def records_after(self, window: int) -> list[WindowRecord]:
        """Those of all windows after `window`, by window and rank."""
        return [record for later in sorted(self._windows) if later > window for record in self.records_of(later)]


def _size(record: WindowRecord) -> int:
    slots = 0 if record.experts is None else 2 * sum(map(len, record.experts.rows))
    return 4 * record.num_ranks + slots
