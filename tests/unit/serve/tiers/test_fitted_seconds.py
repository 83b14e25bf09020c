"""A time as a sum of parts."""

import pytest

from eprt.serve.tiers.fitted_seconds import FittedSeconds


def test_parts_are_learned_and_old_ones_forgotten():
    fit = FittedSeconds((0.1, 1e-3), (1.0, 1e-3), forgetting=0.9)
    assert fit.predict_s(100) == pytest.approx(0.2)
    for factor in (1, 3):
        for i in range(200):
            fit.add_measurement(factor * (0.02 + 2e-4 * (i % 50)), i % 50)
    assert fit.predict_s(10) == pytest.approx(3 * 0.022, rel=0.01)


def test_no_part_is_below_zero():
    fit = FittedSeconds((0.1, 1e-3), (1.0, 1e-3))
    for i in range(100):
        fit.add_measurement(1 / (1 + i % 10), i % 10)
    assert fit.predict_s(9) >= fit.predict_s(0) >= 0
