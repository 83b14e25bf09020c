"""Which pauses between two steps count: those in which a GPU waited for its host while there was work."""

from types import SimpleNamespace

import torch

from eprt.engine import device_gap
from eprt.engine.device_gap import DeviceGap


class Clock:
    """Stands for CUDA events: one is passed as soon as `passed` reaches its time."""

    def __init__(self):
        self.now_ms = self.passed_ms = 0.0

    def event(self) -> SimpleNamespace:
        at_ms = self.now_ms
        return SimpleNamespace(
            at_ms=at_ms,
            query=lambda: at_ms <= self.passed_ms,
            elapsed_time=lambda later: later.at_ms - at_ms,
        )


def test_gaps_between_steps_are_counted_when_the_gpu_has_passed_them(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(device_gap, "_now", clock.event)
    gap = DeviceGap(torch.device("cuda"))
    for begin_ms, end_ms in ((5, 10), (12, 20), (20.5, 30)):  # the first has nothing before it
        clock.now_ms = begin_ms
        gap.begin_step()
        clock.now_ms = end_ms
        gap.end_step()
    clock.passed_ms = 13
    gap.collect()
    assert (gap.num_gaps, list(gap.recent_s)) == (1, [0.002])
    gap.ignore_pause()  # all requests have ended; one comes much later
    clock.now_ms = clock.passed_ms = 900
    gap.begin_step()
    gap.collect()
    assert gap.num_gaps == 2 and abs(gap.total_s - 0.0025) < 1e-9


def test_on_the_cpu_nothing_is_measured():
    gap = DeviceGap(torch.device("cpu"))
    for _ in range(3):
        gap.begin_step()
        gap.end_step()
    gap.collect()
    assert gap.num_gaps == 0
