"""How noise persists is read off the log, and runs of windows are scored by it: closed forms and planted noise."""

import numpy as np
import pytest
from eprt.diagnostics.detect.analysis import find_faults
from eprt.diagnostics.detect.chance import Chance, Memory
from eprt.diagnostics.detect.runs import find_best_runs
from eprt.diagnostics.synthetic import PlantedFault, SyntheticJob, generate

NUM_WINDOWS, NUM_LINKS = 12, 2000


def noise(memory: Memory, seed: int = 0, num_windows: int = NUM_WINDOWS) -> np.ndarray:
    root_WW = np.linalg.cholesky(memory.correlation(num_windows))
    return root_WW @ np.random.default_rng(seed).standard_normal((num_windows, NUM_LINKS))


@pytest.mark.parametrize(
    "planted", [Memory(), Memory(fading=0.9, rho=0.7), Memory(lasting=0.5), Memory(lasting=0.3, fading=0.4, rho=0.5)]
)
def test_what_noise_remembers_is_found(planted):
    """Up to the tapering that leaving out the loudest links and clipping bring."""
    seen_WW, true_WW = (Chance.from_links(noise(planted)).memory.correlation(6), planted.correlation(6))
    assert np.abs(seen_WW - true_WW).max() < 0.12


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


@pytest.mark.parametrize("num_ranks", [4, 5, 8, 13, 48, 128, 256])
def test_places_are_named_from_four_ranks_to_256(num_ranks):
    column = PlantedFault("column", rank=num_ranks - 1, factor=3.0, cause="comp", windows=(2, 5))
    point = PlantedFault("point", src=0, dst=2, factor=6.0, windows=(2, 5))
    for fault in (column, point) if num_ranks > 4 else (column,):
        (finding,) = find_faults(generate(SyntheticJob(num_ranks, 6, seed=num_ranks, faults=(fault,))))[1]
        assert (finding.kind, finding.rank, finding.src, finding.dst) == (fault.kind, fault.rank, fault.src, fault.dst)
        assert finding.cause == fault.cause and (finding.first_window, finding.last_window) == (2, 5)
