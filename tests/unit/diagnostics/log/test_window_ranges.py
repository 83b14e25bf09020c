"""A set of window numbers as ranges is the set itself, in whatever order the numbers come."""

import numpy as np
import pytest
from eprt.diagnostics.log.window_ranges import WindowRanges


def ranges_of(windows) -> WindowRanges:
    ranges = WindowRanges()
    for window in windows:
        ranges.add_window(int(window))
    return ranges


@pytest.mark.parametrize("seed", range(5))
def test_it_is_a_set(seed):
    rng = np.random.default_rng(seed)
    ranges, known = WindowRanges(), set()
    for window in rng.integers(0, 40, 100).tolist():
        assert ranges.add_window(window) == (window not in known)
        known.add(window)
        assert (len(ranges), ranges.first, ranges.last) == (len(known), min(known), max(known))


def test_consecutive_windows_are_one_range():
    ranges = ranges_of([5, 7, 6, 4, 9, 8])
    assert ranges._firsts == [4] and ranges._lasts == [9]
    assert len(ranges_of(np.random.default_rng(0).permutation(1000))._firsts) == 1


def test_a_window_far_away_costs_no_memory():
    ranges = ranges_of([0, 10**18])
    assert len(ranges) == 2 and (ranges.first, ranges.last) == (0, 10**18)


def test_the_last_until_a_window():
    ranges = ranges_of([2, 3, 7])
    assert [ranges.last_until(window) for window in (1, 2, 3, 4, 6, 7, 99)] == [-1, 2, 3, 3, 3, 7, 7]
    assert WindowRanges().last_until(5) == -1


@pytest.mark.parametrize(
    ("earlier", "later"), [([1, 2], [3, 4, 9]), ([1, 2], [4]), ([1], []), ([], [7, 9]), ([1, 5], [6]), ([], [])]
)
def test_later_ranges_are_appended(earlier, later):
    both = ranges_of(earlier)
    both.append_ranges(ranges_of(later))
    expected = ranges_of(earlier + later)
    assert (both._firsts, both._lasts) == (expected._firsts, expected._lasts)
    if later:
        assert not both.add_window(later[-1]) and both.add_window(later[-1] + 1)
