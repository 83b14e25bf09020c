"""WindowRanges: a set of window numbers in little memory. Knows numbers, and nothing of lines or files."""

from bisect import bisect_right


class WindowRanges:
    """Window numbers as ranges of consecutive ones; those of most logs are a single range."""

    def __init__(self):
        self._firsts: list[int] = []  # of each range, ascending
        self._lasts: list[int] = []

    def __len__(self) -> int:
        return sum(self._lasts) - sum(self._firsts) + len(self._firsts)

    @property
    def first(self) -> int:
        return self._firsts[0]

    @property
    def last(self) -> int:
        return self._lasts[-1]

    def last_until(self, window: int) -> int:
        """The largest number that is not above `window`; -1 where there is none."""
        k = bisect_right(self._firsts, window) - 1
        return min(window, self._lasts[k]) if k >= 0 else -1

    def add_window(self, window: int) -> bool:
        """Whether it is new."""
        k = bisect_right(self._firsts, window) - 1
        if k >= 0 and window <= self._lasts[k]:
            return False
        joins_before = k >= 0 and self._lasts[k] == window - 1
        joins_after = k + 1 < len(self._firsts) and self._firsts[k + 1] == window + 1
        if joins_before and joins_after:
            self._lasts[k] = self._lasts.pop(k + 1)
            del self._firsts[k + 1]
        elif joins_before:
            self._lasts[k] = window
        elif joins_after:
            self._firsts[k + 1] = window
        else:
            self._firsts.insert(k + 1, window)
            self._lasts.insert(k + 1, window)
        return True

    def append_ranges(self, later: "WindowRanges") -> None:
        """later: only numbers above all that are in here."""
        firsts, lasts = later._firsts, later._lasts
        if self._lasts and firsts and firsts[0] == self._lasts[-1] + 1:
            self._lasts[-1], firsts, lasts = lasts[0], firsts[1:], lasts[1:]
        self._firsts += firsts
        self._lasts += lasts
