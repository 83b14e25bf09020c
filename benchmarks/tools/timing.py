"""Timing: competitors take turns in one run, and a time is a median with its spread.

    times = measure({"eprt": lambda: ours(m), "torch": lambda: theirs(m)})
    times["torch"].median_s / times["eprt"].median_s

On a shared machine absolute times drift, so competitors are timed alternately and compared by ratio.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Timing:
    """Seconds per call, over several samples."""

    median_s: float
    p10_s: float  # the spread: 10th and 90th percentile
    p90_s: float
    samples: int

    @staticmethod
    def from_samples(samples_s: Sequence[float]) -> "Timing":
        if not samples_s:
            raise ValueError("a timing needs at least one sample")
        ordered = sorted(samples_s)
        return Timing(statistics.median(ordered), quantile(ordered, 0.1), quantile(ordered, 0.9), len(ordered))

    def __add__(self, other: "Timing") -> "Timing":
        """Of two calls that were timed apart: the quantiles added."""
        times = (a + b for a, b in zip(self._times(), other._times()))
        return Timing(*times, min(self.samples, other.samples))

    def _times(self) -> tuple[float, float, float]:
        return self.median_s, self.p10_s, self.p90_s

    def columns(self, name: str, unit: str = "us") -> dict[str, float]:
        """{"NAME_us": median, "NAME_p10_us": ..., "NAME_p90_us": ...}, for BenchmarkReport.row."""
        scale = {"s": 1, "ms": 1e3, "us": 1e6, "ns": 1e9}[unit]
        values = {"": self.median_s, "_p10": self.p10_s, "_p90": self.p90_s}
        return {f"{name}{suffix}_{unit}": float(f"{value * scale:.5g}") for suffix, value in values.items()}


def quantile(ordered: Sequence[float], q: float) -> float:
    """Linear interpolation between the two nearest of sorted values."""
    position = q * (len(ordered) - 1)
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def measure(
    candidates: Mapping[str, Callable[[], Any]],
    *,
    samples: int = 30,
    calls_per_sample: int = 1,
    warmup: int = 3,
    before: Callable[[], Any] | None = None,
) -> dict[str, Timing]:
    """Times the candidates alternately: one sample of each, `samples` times over, in an order that turns each round.

    calls_per_sample: calls timed together, for calls too short to time alone. before: run untimed before each sample
    (a barrier between ranks, a cache flush). The number of calls is fixed, so that ranks stay together.
    """
    names = list(candidates)
    for name in names:
        for _ in range(warmup):
            candidates[name]()
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(samples):
        for i in range(len(names)):
            name = names[(turn + i) % len(names)]
            call = candidates[name]
            if before is not None:
                before()
            start = time.perf_counter()
            for _ in range(calls_per_sample):
                call()
            seconds[name].append((time.perf_counter() - start) / calls_per_sample)
    return {name: Timing.from_samples(values) for name, values in seconds.items()}


class Stopwatch:
    """Accumulates the time spent inside the functions it wraps.

    clock: seconds; time.thread_time counts processor time of the calling thread instead of elapsed time.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self._clock = clock
        self.total_s = 0.0

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **named: Any) -> Any:
            start = self._clock()
            result = function(*arguments, **named)
            self.total_s += self._clock() - start
            return result

        return timed

    def reset(self) -> float:
        """The seconds since the last reset."""
        total_s, self.total_s = self.total_s, 0.0
        return total_s
