"""How a log's noise behaves: what it remembers is found, and how many high windows it makes by itself."""

import numpy as np
import pytest
from eprt.diagnostics.detect.chance import CLIP_Z, Chance, Memory, clipped

from tests.unit.diagnostics.detect.cases import noise


@pytest.mark.parametrize(
    "planted", [Memory(), Memory(fading=0.9, rho=0.7), Memory(lasting=0.5), Memory(lasting=0.3, fading=0.4, rho=0.5)]
)
def test_what_noise_remembers_is_found(planted):
    """Up to the tapering that leaving out the loudest links and clipping bring."""
    seen_WW, true_WW = (Chance.from_links(noise(planted)).memory.correlation(6), planted.correlation(6))
    assert np.abs(seen_WW - true_WW).max() < 0.12


def test_noise_is_the_same_window_and_then_less_and_less():
    correlation_WW = Memory(lasting=0.3, fading=0.4, rho=0.5).correlation(4)
    np.testing.assert_allclose(correlation_WW[0], [1.0, 0.5, 0.4, 0.35])
    np.testing.assert_array_equal(correlation_WW, correlation_WW.T)


def test_heavy_tails_widen_what_counts_as_chance():
    rng = np.random.default_rng(0)
    assert Chance.from_links(rng.standard_normal((12, 2000))).tail == pytest.approx(1.0, abs=0.05)
    assert Chance.from_links(rng.standard_t(3, (12, 2000))).tail > 1.3


def test_two_windows_tell_nothing_of_persistence():
    chance = Chance.from_links(np.full((2, 10), 9.0))
    assert chance.memory == Memory() and chance.tail == 1.0


def test_noise_that_is_high_often_needs_longer_runs():
    calm, loud = Chance(high_rate=1e-4), Chance(high_rate=0.1)
    z_W = np.full(2, 4.0)
    assert calm.is_enough(z_W, 56, 12) and not loud.is_enough(z_W, 56, 12)
    assert loud.is_enough(np.full(6, 4.0), 56, 12) and loud.is_enough(z_W, 56, 2), "all of a short log"
    assert loud.is_enough(np.full(2, 25.0), 56, 12), "far out"
    assert not calm.is_enough(np.array([4.0, 1.0]), 56, 12)


def test_a_window_counts_for_no_more_than_the_bound_and_without_data_for_nothing():
    assert clipped(np.array([9.0, -9.0, 1.0, np.nan])).tolist() == [CLIP_Z, -CLIP_Z, 1.0, 0.0]
