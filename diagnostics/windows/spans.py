"""Spans of windows: a run of any length in bounded memory. Knows which windows share a span, not what is added up.

A span holds one window at first. Once there are too many spans, 2, 4, 8 ... windows with consecutive numbers share one:
their sums are added up, so nothing is left out, and only onset and recovery are known less exactly.
"""

from collections.abc import Callable
from typing import Generic, Self, TypeVar

import numpy as np

from ..log.events import WindowRecord
from ..log.window_ranges import WindowRanges


class WindowSpan:
    """One window, or several with consecutive numbers. Subclasses add up what the records hold."""

    def __init__(self):
        self.windows = WindowRanges()  # of which there is a record
        self.t_start, self.t_end = np.inf, -np.inf  # Unix time, seconds

    def add_record(self, record: WindowRecord) -> None:
        self.windows.add_window(record.window)
        self.t_start, self.t_end = min(self.t_start, record.t_start), max(self.t_end, record.t_end)

    def append_span(self, later: Self) -> None:
        """later: the span with the next windows."""
        self.windows.append_ranges(later.windows)
        self.t_start, self.t_end = min(self.t_start, later.t_start), max(self.t_end, later.t_end)


Span = TypeVar("Span", bound=WindowSpan)


class SpanTable(Generic[Span]):
    """Spans by the first window that may be in them. most: how many are kept; None: as many as there are windows."""

    def __init__(self, new_span: Callable[[], Span], most: int | None = None):
        self.windows_per_span = 1
        self._new_span, self._most = new_span, most
        self._spans: dict[int, Span] = {}

    def items(self) -> list[tuple[int, Span]]:
        """In the order of the windows."""
        return sorted(self._spans.items())

    def span_of(self, window: int) -> Span:
        """The one the window is in; an empty one where it is the first of its span."""
        if self._first_of(window) not in self._spans:
            self._spans[self._first_of(window)] = self._new_span()
            while self._most and len(self._spans) > self._most:
                self._join_neighbours()
        return self._spans[self._first_of(window)]

    def forget_before(self, window: int) -> None:
        for first in [first for first in self._spans if first < window]:
            del self._spans[first]

    def _first_of(self, window: int) -> int:
        return window - window % self.windows_per_span

    def _join_neighbours(self) -> None:
        before, self._spans = self._spans, {}
        self.windows_per_span *= 2
        for first in sorted(before):
            span, start = before.pop(first), self._first_of(first)
            if start in self._spans:
                self._spans[start].append_span(span)
            else:
                self._spans[start] = span
