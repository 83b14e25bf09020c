"""Runs of windows are scored by how noise persists: normal scores of noise, planted steps where they are."""

from statistics import NormalDist

import numpy as np
import pytest
from eprt.diagnostics.detect.chance import Chance, Memory
from eprt.diagnostics.detect.runs import FALSE_ALARM_RATE, find_best_runs, least_score

from tests.unit.diagnostics.detect.cases import NUM_WINDOWS, noise


@pytest.mark.parametrize("memory", [Memory(), Memory(fading=0.9, rho=0.7), Memory(lasting=0.5)])
def test_scores_of_noise_are_normal(memory):
    """The best of all runs of 2000 quiet links is no more than the largest of that many normal numbers may be, and a
    run of the whole log has the variance 1."""
    z_WP = noise(memory, seed=1)
    scores = [run.score for run in find_best_runs(z_WP, Chance(memory), 0.0)]
    assert 2.5 < max(scores) < 5.5
    inverse_WW = np.linalg.inv(memory.correlation(NUM_WINDOWS))
    whole_P = (inverse_WW @ z_WP).sum(axis=0) / np.sqrt(inverse_WW.sum())
    assert whole_P.std() == pytest.approx(1.0, abs=0.06)


def test_a_run_is_found_where_it_is():
    z_WP = noise(Memory(fading=0.9, rho=0.7), seed=2)
    z_WP[4:9, 17] += 8.0
    run = max(find_best_runs(z_WP, Chance.from_links(z_WP), 5.0), key=lambda run: run.score)
    assert (run.place, run.first, run.last) == (17, 4, 8)


def test_one_loud_window_makes_no_run():
    """A link that is loud in one window scores as if that window were like its others."""
    z_WP = np.random.default_rng(3).standard_normal((NUM_WINDOWS, 50)) * 0.1
    z_WP[2:9, 5] += 2.5
    calm = find_best_runs(z_WP, Chance(), 3.0)
    z_WP[5, 5] = 5.0
    loud = find_best_runs(z_WP, Chance(), 3.0)
    assert [run.place for run in calm + loud] == [5, 5]
    assert loud[0].score == pytest.approx(calm[0].score, abs=0.2)


def test_a_link_that_was_always_a_little_slow_is_told_less_readily_than_one_that_became_so():
    """Among links that differ by nature a lasting difference is one of many, and a new one is not."""
    z_WP = noise(Memory(lasting=0.6), seed=4)
    z_WP[:, 0] = 3.5
    z_WP[:, 1] = np.where(np.arange(NUM_WINDOWS) < 4, 0.0, 3.5)
    scores = {run.place: run.score for run in find_best_runs(z_WP, Chance.from_links(z_WP), 0.0)}
    assert scores[0] < 5.0 < scores[1]


@pytest.mark.parametrize("num_places", [1, 8, 64, 65_280])
def test_noise_reaches_the_least_score_at_one_of_the_places_as_rarely_as_wanted(num_places):
    chance = 1 - NormalDist().cdf(least_score(num_places))
    assert num_places * chance == pytest.approx(FALSE_ALARM_RATE, rel=1e-3)


def test_windows_without_data_make_no_run():
    z_WP = np.full((6, 3), np.nan)
    assert find_best_runs(z_WP, Chance(), 1.0) == []
    z_WP[2:5, 1] = 5.0
    (run,) = find_best_runs(z_WP, Chance(), 1.0)
    assert (run.place, run.first, run.last) == (1, 2, 4)
