"""What two-batch overlap could save at most, and which passes are timed."""

import pytest

from benchmarks.serving import two_batch
from benchmarks.serving.two_batch import TwoBatchBound, power_columns, rested_times
from eprt import EPGroup


def test_a_bound_is_the_halves_without_the_exchange_on_the_sms_that_are_left():
    bound = TwoBatchBound(none_us=1000, halves_us=1040, exposed_us=200, sms_share=0.25)
    assert bound.least_us == 1040 - 150
    assert bound.saves == pytest.approx(0.11)
    assert bound.columns() == {
        "none_period_us": 1000,
        "halves_period_us": 1040,
        "halves_exposed_us": 200,
        "tbo_least_us": 890,
        "tbo_saves_at_most": 0.11,
    }


def test_halves_that_cost_more_than_the_exchange_leave_nothing_to_save():
    assert TwoBatchBound(none_us=1000, halves_us=1300, exposed_us=200, sms_share=0.0).saves < 0


def test_every_call_is_timed_in_every_sample():
    made = []
    times = rested_times(EPGroup.single(), {name: lambda name=name: made.append(name) for name in "ab"}, 3, None)
    assert made == ["a", "b"] * 3
    assert all(len(times[name]) == 3 and min(times[name]) > 0 for name in "ab")


def test_a_driver_that_tells_nothing_adds_no_columns(monkeypatch):
    def no_nvml():
        raise OSError("libnvidia-ml.so.1: cannot open shared object file")

    monkeypatch.setattr(two_batch, "GpuPower", no_nvml)
    assert power_columns(EPGroup.single(), {}, 3) == {}
