"""Spans share windows only when there are too many, always with their neighbours, and lose nothing."""

import numpy as np
import pytest
from eprt.diagnostics.windows.spans import SpanTable, WindowSpan

from tests.unit.diagnostics.cases import record


def table_of(windows, most: int | None = None, **times) -> SpanTable[WindowSpan]:
    table = SpanTable(WindowSpan, most)
    for window in windows:
        table.span_of(window).add_record(record(window=window, **times))
    return table


def contents(table: SpanTable[WindowSpan]) -> list[tuple[int, int, int, int]]:
    """(first window that may be in it, first and last that are, how many) of each span."""
    return [(first, span.windows.first, span.windows.last, len(span.windows)) for first, span in table.items()]


def test_each_window_has_its_span_while_they_fit():
    table = table_of([3, 1, 2, 3], most=3)
    assert contents(table) == [(1, 1, 1, 1), (2, 2, 2, 1), (3, 3, 3, 1)] and table.windows_per_span == 1


def test_neighbours_share_a_span_when_there_are_too_many():
    table = table_of(range(9), most=3)
    assert table.windows_per_span == 4 and contents(table) == [(0, 0, 3, 4), (4, 4, 7, 4), (8, 8, 8, 1)]
    assert [(span.t_start, span.t_end) for _, span in table.items()] == [(1000, 1040), (1040, 1080), (1080, 1090)]


@pytest.mark.parametrize("seed", range(3))
def test_the_order_in_which_records_come_does_not_matter(seed):
    windows = [*range(2, 20), *range(40, 61), 5, 6]
    shuffled = np.random.default_rng(seed).permutation(windows).tolist()
    assert contents(table_of(shuffled, most=7)) == contents(table_of(windows, most=7))


def test_a_window_far_away_joins_the_others_quickly():
    times = {"t_start": 1.0, "t_end": 2.0}
    table = table_of([*range(4), 10**15], most=4, **times)
    assert contents(table) == [(0, 0, 1, 2), (2, 2, 3, 2), (10**15, 10**15, 10**15, 1)]
    table = table_of([0, 10**15, 2 * 10**15], most=1, **times)
    ((first, low, high, count),) = contents(table)
    assert (first, low, high, count) == (0, 0, 2 * 10**15, 3)


def test_without_a_bound_nothing_is_shared():
    assert table_of(range(500)).windows_per_span == 1


def test_spans_of_old_windows_are_forgotten():
    table = table_of(range(6))
    table.forget_before(4)
    assert [first for first, _ in table.items()] == [4, 5]
