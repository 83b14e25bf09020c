"""Noises have the middle, the spread and the memory that they say."""

import math

import numpy as np
import pytest
from eprt.diagnostics.synthetic.noises import NOISES, log_sigma

SHAPE = (40, 5000)
NAMES = ("lognormal", "gamma", "heavy", "autocorrelated")  # the fault suite adds others to NOISES


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("cv", [0.1, 0.25])
def test_the_middle_is_one_and_the_spread_is_as_asked(name, cv):
    values = NOISES[name](np.random.default_rng(0), SHAPE, cv)
    assert values.shape == SHAPE and values.min() > 0
    assert np.median(values) == pytest.approx(1.0, abs=0.03)
    middle = np.quantile(np.log(values), [0.25, 0.75])
    assert np.diff(middle)[0] / 1.349 == pytest.approx(log_sigma(cv), rel=0.15), "a normal one's quartiles"


def test_heavy_tails_reach_further():
    far = {name: np.mean(NOISES[name](np.random.default_rng(0), SHAPE, 0.25) > 2.5) for name in NAMES}
    assert far["heavy"] > 0.005 > 0.0005 > far["lognormal"]


def test_autocorrelated_noise_stays_for_a_few_windows():
    logs = np.log(NOISES["autocorrelated"](np.random.default_rng(0), SHAPE, 0.25))
    assert [np.mean(logs[k:] * logs[: len(logs) - k]) / np.var(logs) for k in (1, 3)] == pytest.approx(
        [0.7, 0.343], abs=0.02
    )


def test_the_logarithms_deviation_gives_the_coefficient_of_variation():
    values = np.exp(log_sigma(0.5) * np.random.default_rng(0).standard_normal(1_000_000))
    assert np.std(values) / np.mean(values) == pytest.approx(0.5, rel=0.02) and math.isclose(log_sigma(0), 0)
