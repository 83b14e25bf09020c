"""Waits taken apart: what ranks and links add is found again, and no fault shifts the scale it is measured by."""

import numpy as np
import pytest
from eprt.diagnostics.detect.effects import FLOOR_US, MIN_SIGMA, START, Effects, ratio_of
from eprt.diagnostics.detect.topology import LinkTopology


def one_tier(num_ranks: int) -> np.ndarray:
    return LinkTopology.from_nodes(np.zeros(num_ranks, dtype=int)).tier_NN


def waits_of(factor_of_column_N, factor_of_row_N, *, us: float = 1e6, seed: int = 0, cv: float = 0.0) -> np.ndarray:
    """One window; long waits, so that the floor of the logarithm does not matter."""
    noise_NN = np.exp(cv * np.random.default_rng(seed).standard_normal((len(factor_of_row_N),) * 2))
    return (us * np.outer(factor_of_row_N, factor_of_column_N) * noise_NN)[None]


def test_a_late_rank_is_a_column_effect_of_its_size():
    factor_N = np.ones(9)
    factor_N[4] = 3.0
    effects = Effects.from_waits(waits_of(factor_N, np.ones(9)), one_tier(9))
    np.testing.assert_allclose(ratio_of(effects.column_WN[0]), factor_N, rtol=1e-4)
    np.testing.assert_allclose(effects.row_WN, 0.0, atol=1e-9)
    np.testing.assert_allclose(np.nan_to_num(effects.point_WNN), 0.0, atol=1e-9)


def test_up_to_nearly_half_of_the_ranks_may_be_slow():
    factor_N = np.array([1.0] * 6 + [4.0] * 3)
    effects = Effects.from_waits(waits_of(np.ones(9), factor_N), one_tier(9))
    np.testing.assert_allclose(ratio_of(effects.row_WN[0]) / ratio_of(effects.row_WN[0, 0]), factor_N, rtol=1e-4)


def test_links_between_nodes_have_a_usual_wait_of_their_own():
    node_N = np.arange(8) // 4
    waits_WNN = waits_of(np.ones(8), np.ones(8)) * np.where(node_N[:, None] == node_N[None, :], 1.0, 7.0)
    waits_WNN[0, 1, 6] *= 5.0
    effects = Effects.from_waits(waits_WNN, LinkTopology.from_nodes(node_N).tier_NN)
    assert ratio_of(effects.point_WNN[0, 1, 6]) == pytest.approx(5.0, rel=1e-4)
    effects.point_WNN[0, 1, 6] = 0.0
    np.testing.assert_allclose(np.nan_to_num(effects.point_WNN), 0.0, atol=1e-9)


def test_what_is_not_known_is_nan_and_tells_nothing():
    waits_WNN = waits_of(np.ones(6), np.ones(6), cv=0.2)
    waits_WNN[0, 2] = np.nan
    effects = Effects.from_waits(waits_WNN, one_tier(6))
    assert np.isnan(effects.row_WN[0, 2]) and np.isnan(effects.point_WNN[0, 2]).all()
    assert np.isfinite(effects.column_WN).all() and np.isnan(effects.point_WNN[0].diagonal()).all()
    nothing = Effects.from_waits(np.full((1, 6, 6), np.nan), one_tier(6))
    assert np.isnan(nothing.column_WN).all() and np.isfinite(nothing.rank_error_W1).all()


@pytest.mark.parametrize("num_ranks", [4, 16, 64])
def test_the_scale_is_the_deviation_of_the_noise(num_ranks):
    waits_WNN = np.concatenate([waits_of(*np.ones((2, num_ranks)), seed=s, cv=0.2) for s in range(200)])
    effects = Effects.from_waits(waits_WNN, one_tier(num_ranks))
    # The started logarithm sees a share of 1 / (1 + START) of it.
    assert effects.sigma_W1.mean() == pytest.approx(0.2 / (1 + START), rel=0.1)
    assert effects.sigma_W1.min() >= MIN_SIGMA


def test_waits_below_the_cost_of_looking_are_noise():
    waits_WNN = waits_of(np.ones(8), np.ones(8), us=FLOOR_US / 100)
    waits_WNN[0, 1, 2] *= 5
    assert Effects.from_waits(waits_WNN, one_tier(8)).point_WNN[0, 1, 2] < 0.1


def test_the_ratio_of_no_effect_is_one():
    assert ratio_of(np.zeros(1)) == 1.0 and ratio_of(np.array([-9.0])) == 0.0


def test_a_tier_has_the_noise_of_its_own_links():
    node_N = np.arange(16) // 8
    tier_NN = LinkTopology.from_nodes(node_N).tier_NN
    cv_NN, rng = np.where(tier_NN == 1, 0.3, 0.1), np.random.default_rng(0)
    effects = Effects.from_waits(1e6 * np.exp(cv_NN * rng.standard_normal((12, 16, 16))), tier_NN)
    spread = [float(effects.point_z_WNN[:, tier_NN == tier].std()) for tier in (0, 1)]
    assert spread == pytest.approx([1.0, 1.0], abs=0.25), "one scale for both gives 0.7 and 1.7"
    alone = Effects.from_waits(1e6 * np.exp(0.3 * rng.standard_normal((12, 4, 4))), one_tier(4))
    assert (alone.sigma_NN == 1).all()


def test_ranks_that_differ_for_good_are_no_outliers():
    rng = np.random.default_rng(1)
    waits_WNN = 1e6 * np.exp(np.linspace(-0.4, 0.4, 16) + 0.1 * rng.standard_normal((12, 16, 16)))
    effects = Effects.from_waits(waits_WNN, one_tier(16))
    assert np.median(effects.column_error_W1) > 0.14 > 2 * np.median(effects.rank_error_W1)
    assert np.median(effects.row_error_W1) < 1.3 * np.median(effects.rank_error_W1)
