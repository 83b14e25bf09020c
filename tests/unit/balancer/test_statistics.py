"""LoadStatistics: the running mean, changes of the load, and how long a load lasts."""

import numpy as np
import pytest
from eprt.balancer.statistics import LoadStatistics, change_point

NUM_LAYERS, NUM_EXPERTS = 2, 16


def skewed(rng: np.random.Generator, sigma: float = 0.8) -> np.ndarray:
    """Choice probabilities [L, E]."""
    weight_LE = np.exp(sigma * rng.normal(size=(NUM_LAYERS, NUM_EXPERTS)))
    return weight_LE / weight_LE.sum(1, keepdims=True)


def window(rng: np.random.Generator, share_LE: np.ndarray, tokens: int = 3000) -> np.ndarray:
    """Counts [2, L, E], a third of them prefill."""
    return np.stack([[rng.multinomial(tokens * part // 3, row) for row in share_LE] for part in (1, 2)])


def make(**options) -> LoadStatistics:
    return LoadStatistics(NUM_LAYERS, NUM_EXPERTS, **options)


def test_the_mean_forgets_by_half_lives_and_keeps_phases_apart():
    statistics = make(half_life=2.0, min_tokens=1)
    counts_WPLE = np.random.default_rng(0).integers(1, 99, (5, 2, NUM_LAYERS, NUM_EXPERTS))
    for k, counts_PLE in enumerate(counts_WPLE):
        statistics.add_window(counts_PLE, seconds=1.0 + k, steps=10 * k)
    weight_W = 0.5 ** (np.array([4, 3, 2, 1, 0]) / 2)
    seconds = (weight_W * (1 + np.arange(5))).sum()
    want_PLE = (weight_W[:, None, None, None] * counts_WPLE).sum(0) / seconds
    np.testing.assert_allclose(statistics.rate(), want_PLE.sum(0))
    np.testing.assert_array_equal(statistics.windows("prefill"), counts_WPLE[:, 0])
    assert statistics.steps_per_s == pytest.approx((weight_W * 10 * np.arange(5)).sum() / seconds)
    np.testing.assert_array_equal(statistics.windows("decode"), counts_WPLE[:, 1])
    np.testing.assert_array_equal(statistics.windows(), counts_WPLE.sum(1))


def test_the_noise_of_a_rate_falls_with_its_windows():
    statistics = make(half_life=1e9)
    for count in (1, 4, 16):
        while len(statistics) < count:
            statistics.add_window(np.full((2, NUM_LAYERS, NUM_EXPERTS), 100), 1.0)
        assert statistics.noise() == pytest.approx(1 / np.sqrt(count))
    assert statistics.noise(last=4) == pytest.approx(1 / 2)
    assert make().noise() == 0


def test_a_window_that_ends_while_a_rate_is_worked_out_counts_in_the_next(monkeypatch):
    """Windows are taken in by another thread than the one that answers a scrape of the metrics."""
    rng = np.random.default_rng(0)
    statistics, weights = make(max_windows=2), LoadStatistics._weights
    for _ in range(2):
        statistics.add_window(window(rng, skewed(rng)), 1.0)

    def interrupted(self, num_windows):
        monkeypatch.setattr(LoadStatistics, "_weights", weights)
        self.add_window(window(rng, skewed(rng)), 1.0)
        return weights(self, num_windows)

    monkeypatch.setattr(LoadStatistics, "_weights", interrupted)
    before = statistics.rate()
    newest = statistics.windows()[-2:]
    mean = (newest[1] + newest[0] * 0.5 ** (1 / 6)) / (1 + 0.5 ** (1 / 6))
    assert not np.array_equal(before, statistics.rate())
    np.testing.assert_allclose(statistics.rate(), mean, rtol=1e-5)


def test_without_a_window_nothing_is_known():
    statistics = make()
    assert statistics.rate() is None and statistics.lifetime_s == statistics.steps_per_s == 0
    assert statistics.windows().shape == (0, NUM_LAYERS, NUM_EXPERTS)
    idle_PLE = np.zeros((2, NUM_LAYERS, NUM_EXPERTS))
    idle_PLE[0, 0, 0] = 300  # fewer than min_tokens (256) per layer: an idle server tells nothing
    assert not statistics.add_window(idle_PLE, 5.0)
    assert len(statistics) == 0 and statistics.rate() is None


@pytest.mark.parametrize("bad, words", [(-1, "= -1"), (np.nan, "= nan"), (np.inf, "= inf")])
def test_what_is_no_count_is_named(bad, words):
    counts_PLE = np.ones((2, NUM_LAYERS, NUM_EXPERTS))
    counts_PLE[1, 0, 3] = bad
    with pytest.raises(ValueError, match=rf"tokens\[decode, layer 0, expert 3\] {words}"):
        make().add_window(counts_PLE, 1.0)
    with pytest.raises(ValueError, match=r"shape \(2, 1, 16\), expected \(2, 2, 16\)"):
        make().add_window(np.ones((2, 1, 16)), 1.0)
    with pytest.raises(ValueError, match=r"seconds=0\.0"):
        make().add_window(np.full((2, NUM_LAYERS, NUM_EXPERTS), 99), 0.0)


def test_steps_are_found_in_their_windows():
    """Windows of few tokens are left out, and so are their steps."""
    statistics = LoadStatistics(1, 4, max_windows=3)
    for last_step, tokens in ((10, 900), (20, 900), (30, 1), (40, 900), (45, 900)):
        statistics.add_window(np.full((2, 1, 4), tokens), 1.0, 10 if last_step < 45 else 5, last_step)
    assert len(statistics) == 3, "the first is forgotten"
    steps = np.array([1, 10, 11, 20, 21, 30, 31, 40, 41, 45, 46])
    assert statistics.window_of_steps(steps).tolist() == [-1, -1, 0, 0, -1, -1, 1, 1, 2, 2, -1]


def test_memory_is_bounded():
    rng = np.random.default_rng(1)
    statistics = make(max_windows=40)
    for k in range(300):
        if k % 10 == 0:
            share_LE = skewed(rng)
        statistics.add_window(window(rng, share_LE), 1.0)
        assert len(statistics) <= 40 and len(statistics._skew_WD) <= 32 and statistics._gram_WW.shape[0] <= 32
    assert len(statistics) == 40 and len(statistics._changes) <= 16


def test_a_change_is_found_soon_and_what_came_before_is_forgotten():
    rng = np.random.default_rng(2)
    statistics, first_LE, second_LE = make(), skewed(rng), skewed(rng)
    assert not any(statistics.add_window(window(rng, first_LE), 5.0) for _ in range(12))
    found = [statistics.add_window(window(rng, second_LE), 5.0) for _ in range(8)]
    assert sum(found) == 1 and found.index(True) <= 3  # four windows at most
    assert statistics.num_changes == 1 and len(statistics.current_windows) == 8
    rate_LE = statistics.rate()
    share_LE = rate_LE / rate_LE.sum(1, keepdims=True)
    distance = [np.abs(share_LE - one_LE).sum(1).mean() / 2 for one_LE in (first_LE, second_LE)]
    assert distance[1] < 0.03 < 0.2 < distance[0], distance


def test_noise_is_seldom_taken_for_a_change():
    rng = np.random.default_rng(3)
    for tokens in (300, 3000, 100_000):
        statistics, share_LE = make(min_shift=0.0), skewed(rng)
        for _ in range(100):
            statistics.add_window(window(rng, share_LE, tokens), 5.0)
        assert statistics.num_changes <= 2, tokens


def test_a_change_too_small_to_matter_is_none():
    rng = np.random.default_rng(4)
    share_LE = skewed(rng)
    other_LE = share_LE.copy()
    other_LE[:, 0] += 0.01
    other_LE[:, 1] -= 0.01
    for min_shift, changes in ((0.02, 0), (0.002, 1)):
        statistics = make(min_shift=min_shift)
        for k in range(24):
            statistics.add_window(window(rng, share_LE if k < 12 else other_LE, 10**6), 5.0)
        assert statistics.num_changes == changes


def test_change_point_is_exact_for_any_noise():
    """p-values of windows without a change are uniform, or larger; heavy tails included."""
    rng = np.random.default_rng(5)
    found = 0
    for trial in range(300):
        x_WD = rng.standard_cauchy((12, 5))
        found += change_point(x_WD @ x_WD.T, significance=0.05, seed=trial) is not None
    assert found <= 28  # 15 expected, standard deviation 3.8
    x_WD = np.concatenate((rng.normal(size=(7, 5)), rng.normal(size=(5, 5)) + 3))
    start, p_value = change_point(x_WD @ x_WD.T)
    assert start == 7 and p_value == 0.005
    assert change_point(np.eye(5)) is None  # too few to have three on each side


def lifetime(
    turnover_windows: float | None, num_windows: int = 60, seed: int = 0, tokens: int = 3000, **options
) -> LoadStatistics:
    """A load whose logarithm forgets itself with this time constant; windows of 5 s."""
    rng = np.random.default_rng(seed)
    statistics, x_LE = make(**options), rng.normal(size=(NUM_LAYERS, NUM_EXPERTS))
    for _ in range(num_windows):
        weight_LE = np.exp(0.8 * x_LE)
        statistics.add_window(window(rng, weight_LE / weight_LE.sum(1, keepdims=True), tokens), 5.0)
        if turnover_windows is not None:
            keep = np.exp(-1 / turnover_windows)
            x_LE = keep * x_LE + np.sqrt(1 - keep**2) * rng.normal(size=x_LE.shape)
    return statistics


def test_the_expected_lifetime_comes_from_the_data():
    """The faster the drift, the shorter; what never changed is trusted for as long as it was seen."""
    assert lifetime(None).lifetime_s == pytest.approx(60 * 5, rel=0.1)
    assert lifetime(None, num_windows=20).lifetime_s == pytest.approx(20 * 5, rel=0.1)
    medians = [np.median([lifetime(turnover, seed=seed).lifetime_s for seed in range(7)]) for turnover in (3, 12, 60)]
    assert 5 <= medians[0] <= 30 <= medians[1] <= 75 <= medians[2] <= 250, medians


def test_drift_is_measured_apart_from_the_noise_of_counting():
    """A time constant of 20 windows (100 s), whether a window holds many tokens or few; no change is looked for."""
    for tokens in (600, 30_000):
        rates = [lifetime(20, 24, seed, tokens, significance=0.0).drift_rate for seed in range(15)]
        assert 1 / 200 <= np.median(rates) <= 1 / 50, rates
    assert np.median([lifetime(None, 30, seed, 600).drift_rate for seed in range(9)]) < 1 / 1000


def test_a_load_that_jumps_to_and_fro_is_not_trusted():
    rng = np.random.default_rng(6)
    statistics, shares = make(), (skewed(rng), skewed(rng))
    for k in range(60):
        statistics.add_window(window(rng, shares[k // 10 % 2]), 5.0)
    assert statistics.num_changes == 5
    assert 20 <= statistics.lifetime_s <= 100  # it lasts 50 s
