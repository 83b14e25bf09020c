"""Timing: medians with their spread, and competitors that take turns."""

import time

import pytest

from benchmarks.tools.timing import Stopwatch, Timing, measure


def test_timing_is_median_and_spread():
    timing = Timing.from_samples([5.0, 1.0, 2.0, 3.0, 4.0])
    assert (timing.median_s, timing.samples) == (3.0, 5)
    assert timing.p10_s == pytest.approx(1.4) and timing.p90_s == pytest.approx(4.6)
    assert timing.columns("ours", "ms") == {"ours_ms": 3000.0, "ours_p10_ms": 1400.0, "ours_p90_ms": 4600.0}
    with pytest.raises(ValueError, match="at least one"):
        Timing.from_samples([])


def test_times_of_parts_add_up():
    both = Timing(3.0, 1.0, 5.0, 9) + Timing(0.5, 0.25, 1.0, 7)
    assert both == Timing(3.5, 1.25, 6.0, 7)


def test_measure_alternates_and_calls_equally_often():
    calls: list[str] = []
    times = measure(
        {"a": lambda: calls.append("a"), "b": lambda: calls.append("b")},
        samples=4,
        calls_per_sample=2,
        warmup=1,
        before=lambda: calls.append("|"),
    )
    assert "".join(calls) == "ab" + "|aa|bb" + "|bb|aa" + "|aa|bb" + "|bb|aa"
    assert times["a"].samples == times["b"].samples == 4


def test_measure_tells_slow_from_fast():
    times = measure({"slow": lambda: time.sleep(0.02), "fast": lambda: None}, samples=3)
    assert times["slow"].median_s >= 0.02 > times["fast"].median_s


def test_a_stopwatch_counts_only_what_it_wraps():
    now = iter([1.0, 1.5, 7.0, 7.25])
    watch = Stopwatch(lambda: next(now))
    double = watch.wrap(lambda x, *, plus=0: 2 * x + plus)
    assert (double(3), double(1, plus=1)) == (6, 3)
    assert (watch.reset(), watch.reset()) == (0.75, 0.0)
