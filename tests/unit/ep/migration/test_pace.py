"""Pace: how much is copied, and how often, for steps of any length; on a clock that the test turns."""

import pytest

from eprt.ep.migration import pace
from eprt.ep.migration.pace import Pace


class Clock:
    now_s = 100.0

    def perf_counter(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(pace, "time", clock)
    return clock


def steps(clock: Clock, one: Pace, count: int, step_s: float) -> None:
    for _ in range(count):
        clock.now_s += step_s
        one.stepped(step_s)


def test_room_is_a_share_of_a_step_between_the_least_and_the_most(clock):
    one = Pace(share=0.03, min_bytes=16 << 10, max_bytes=4 << 20)
    assert one.room == 1 << 20, "nobody waits for a token"
    for step_s, want in ((0.02, 300_000), (0.0002, 16 << 10), (2.0, 4 << 20)):
        steps(clock, one, 31, step_s)
        assert abs(one.room - want) <= 64  # 1 GB/s before anything was measured, half of it for what comes
    steps(clock, one, 31, 0.02)
    for _ in range(10):
        one.copied(1_000_000, 1e-4)
    assert abs(one.room - 3_000_000) <= 64  # 10 GB/s


@pytest.mark.parametrize("step_s", [0.0003, 0.001, 0.02])
def test_the_host_works_a_twentieth_of_its_time(clock, step_s):
    """Whenever it may, for 0.4 ms: rarely where steps are short, in nearly every one of 20 ms."""
    one = Pace()
    steps(clock, one, 31, step_s)
    worked_s = begin_s = 0.0
    while worked_s < 0.1:
        if not one.rests:
            begin_s = begin_s or clock.now_s
            one.worked(0.0004)
            worked_s += 0.0004
        steps(clock, one, 1, step_s)
    share = worked_s / (clock.now_s - begin_s)
    assert share <= 0.052 and (share > 0.018), share


def test_it_does_not_rest_where_nobody_waits(clock):
    one = Pace()
    one.worked(1.0)
    assert not one.rests, "no step has computed yet"
    steps(clock, one, 1, 0.001)
    assert one.rests
    clock.now_s += 0.25
    assert not one.rests, "one long work is not paid for ever"
    one.worked(1.0)
    one.worked(1.0)
    clock.now_s += 1.1
    assert not one.rests, "quiet"
    patient = Pace(share=100.0)
    steps(clock, patient, 1, 0.001)
    patient.worked(1.0)
    assert not patient.rests
