"""The fault suite (benchmarks/diagnosis), reduced: its targets hold, with noise the detector was not tuned on."""

from collections import Counter

import pytest
from eprt.diagnostics.detect.analysis import find_faults
from eprt.diagnostics.synthetic import PlantedFault, SyntheticJob, generate

from benchmarks.diagnosis.bench_faults import (
    CLEAN,
    NUM_WINDOWS,
    CleanCase,
    FaultCase,
    Tally,
    job_of,
    place,
    run_case,
    run_clean,
)

NOISES = ("gamma", "heavy", "autocorrelated", "arrivals")
SEEDS = 6  # of each noise and number of ranks


def tallied(kind: str, cause: str, factor: float, dated_seeds: int = 0) -> Tally:
    total = Tally()
    for noise in NOISES if kind != "row" else NOISES[:-1]:
        for num_ranks in (8, 16):
            total += run_case(FaultCase(noise, num_ranks, ((kind, cause),), factor), SEEDS, ("robust",), dated_seeds)[
                "robust"
            ]
    return total


@pytest.mark.parametrize("cause", ["comp", "comm", "mixed"])
def test_a_column_twice_the_usual(cause):
    tally = tallied("column", cause, 2.0, dated_seeds=2)
    assert tally.recall >= 0.95 and tally.precision >= 0.95 and tally.cause_right >= 0.95
    assert sorted(tally.delays)[len(tally.delays) // 2] <= 3, "windows until it is reported"


@pytest.mark.parametrize("cause", ["comm", "mixed"])
def test_a_row_twice_the_usual(cause):
    tally = tallied("row", cause, 2.0)
    assert tally.recall >= 0.95 and tally.precision >= 0.95 and tally.cause_right >= 0.95


@pytest.mark.parametrize("cause", ["comm", "mixed"])
def test_a_point_three_times_the_usual(cause):
    tally = tallied("point", cause, 3.0)
    assert tally.recall >= 0.85 and tally.precision >= 0.95 and tally.cause_right >= 0.95


def test_the_most_certain_finding_is_the_fault():
    tally = tallied("column", "comp", 3.0)
    assert tally.first == tally.jobs


def test_clean_jobs_are_left_alone():
    alarms, windows = Counter(), 0
    for noise in NOISES:
        for burden in CLEAN:
            alarms += run_clean(CleanCase(noise, 16, burden), SEEDS, ("robust",))["robust"]
            windows += SEEDS * NUM_WINDOWS
    assert sum(alarms.values()) <= 2 and windows > 1000, alarms


def test_two_simpler_methods_miss_what_this_one_finds():
    """At 8 ranks a column of twice the usual wait is below three means, and below three standard deviations."""
    tallies = run_case(FaultCase("gamma", 8, (("column", "comp"),), 2.0), 10)
    assert tallies["robust"].recall == 1.0
    assert tallies["zscore"].recall <= 0.2 and tallies["ratio"].recall <= 0.2


@pytest.mark.parametrize("factor", [8.0, 15.0])
def test_the_echo_of_a_slow_link_is_never_told(factor):
    """Who gets a link's data late is late to all others. Seen window by window as they come, while the link is slow,
    in the window in which it recovers, and afterwards."""
    for seed in range(4):
        link = {"src": 1 + seed, "dst": 14 - seed}
        slow = PlantedFault("point", **link, factor=factor, windows=(4, 7))
        recovering = PlantedFault("point", **link, factor=2.0, windows=(8, 8))
        matrices = generate(job_of("arrivals", 16, seed, (slow, recovering)))
        seen = [find_faults(matrices.first(num))[1] for num in range(4, NUM_WINDOWS + 1)]
        told = [set(map(place, findings)) for findings in seen]
        assert set().union(*told) == {place(slow)} and told[4] == {place(slow)}


@pytest.mark.parametrize(("more", "cause"), [(1.4, "comm"), (8.0, "comp")])
def test_compute_is_the_cause_only_where_it_makes_up_the_wait(more, cause):
    """A slow sender waits as long as the others. That it computes a little longer too is not what all wait for."""
    sender = PlantedFault("column", rank=5, factor=4.0, cause="comm")
    matrices = generate(SyntheticJob(8, noise="arrivals", seed=3, faults=(sender,)))
    matrices.compute_us_WN[:, 5] *= more
    findings = [f for f in find_faults(matrices)[1] if f.kind == "column"]
    assert [(f.rank, f.cause) for f in findings] == [(5, cause)]
