"""Changes against the own past: a step is found with its windows and size; noise, drops and short waves are not."""

import numpy as np
import pytest
from eprt.diagnostics.detect.chance import Chance
from eprt.diagnostics.detect.past import Limits, find_changes, tail_of_changes

LIMITS = Limits(min_ratio=1.35, short_ratio=0.3, min_windows=3, min_peer_ratio=0.0)


def changes_of(effect_WP: np.ndarray, limits: Limits = LIMITS, num_before: int = 0) -> list[tuple]:
    found = find_changes(effect_WP, effect_WP, Chance(), limits, num_before)
    return [(run.place, run.first, run.last, ratio) for run, ratio in found]


def noise(num_windows: int = 12, num_places: int = 6, seed: int = 0) -> np.ndarray:
    levels_P = np.random.default_rng(seed + 99).normal(0, 1, num_places)
    return levels_P + 0.1 * np.random.default_rng(seed).standard_normal((num_windows, num_places))


def test_a_step_is_found_whatever_the_place_s_own_level():
    effect_WP = noise()
    effect_WP[4:, 2] += 0.7
    ((place, first, last, ratio),) = changes_of(effect_WP)
    assert (place, first, last) == (2, 4, 11)
    assert ratio == pytest.approx(1.25 * np.exp(0.7) - 0.25, rel=0.15)


def test_it_may_end():
    effect_WP = noise()
    effect_WP[4:8, 2] += 0.9
    assert [found[:3] for found in changes_of(effect_WP)] == [(2, 4, 7)]


def test_noise_is_none():
    assert sum(len(changes_of(noise(seed=seed))) for seed in range(100)) == 0


def test_a_past_is_needed_and_a_drop_is_not_a_change():
    effect_WP = noise()
    effect_WP[:2, 1] += 2
    effect_WP[6:, 3] -= 2
    assert changes_of(effect_WP) == []
    assert changes_of(noise(4)) == []


def test_short_runs_and_small_ratios_are_left_to_the_peers():
    effect_WP = noise()
    effect_WP[6:8, 2] += 2
    effect_WP[5:, 4] += 0.2
    assert changes_of(effect_WP) == []


def test_a_baseline_is_the_past_of_the_first_window_and_no_run_begins_in_it():
    effect_WP = noise(16)
    effect_WP[8:, 0] += 0.8
    effect_WP[5:8, 1] += 2
    assert [found[:3] for found in changes_of(effect_WP, num_before=8)] == [(0, 8, 15)]


def test_nothing_known_is_nothing_found():
    assert changes_of(np.full((12, 3), np.nan)) == []


def test_a_ratio_may_be_told_otherwise_than_by_logarithms():
    effect_WP = noise()
    effect_WP[4:, 2] += 0.7
    found = find_changes(effect_WP, effect_WP, Chance(), LIMITS, 0, lambda run, change: 1 + change + run.place)
    assert [ratio for _, ratio in found] == [pytest.approx(3.7, rel=0.05)]


def test_a_shorter_run_needs_a_larger_ratio():
    assert LIMITS.least_ratio(3) == pytest.approx(1.45)
    assert LIMITS.least_ratio(30) == pytest.approx(1.36)


def test_tails_are_read_off_the_larger_changes_and_a_step_is_none():
    effect_WP = noise(200)
    assert tail_of_changes(effect_WP) == pytest.approx(1, abs=0.1)
    effect_WP[100:, 2] += 5
    assert tail_of_changes(effect_WP) == pytest.approx(1, abs=0.1)
    heavy = 0.1 * np.random.default_rng(3).standard_t(1.5, (200, 6))
    assert tail_of_changes(heavy) > 1.3
    assert tail_of_changes(np.zeros((12, 6))) == 1.0
