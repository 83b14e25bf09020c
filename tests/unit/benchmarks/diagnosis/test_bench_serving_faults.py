"""The fault suite on simulated serving jobs, reduced, on families and seeds that nothing is tuned on."""

import pytest
from eprt.diagnostics import Report

from benchmarks.diagnosis.bench_serving_faults import ServingCase, cases, is_named, summary, tally
from benchmarks.diagnosis.serving_job import play_records
from benchmarks.diagnosis.serving_noise import UNSEEN, UNSEEN_SEEDS

RANKS = (4, 8, 16)


def tallied(kind: str, factor: float = 1.0, ranks=RANKS, most: int = 3) -> dict[str, float]:
    """`everything` is left out where the other noises are enough to tell."""
    rows = [tally(ServingCase(family, n, kind, factor), UNSEEN_SEEDS, most) for family in UNSEEN for n in ranks]
    return {name: sum(row[name] for row in rows) for name in ("jobs", "named", "others", "blamed", "windows")}


@pytest.mark.parametrize(("kind", "factor"), [("column comp", 3.0), ("row", 2.0), ("point", 3.0)])
def test_a_fault_is_named(kind, factor):
    counts = tallied(kind, factor)
    assert counts["named"] >= 0.9 * counts["jobs"]


@pytest.mark.parametrize(("kind", "factor"), [("job", 3.0), ("tier", 4.0), ("node comp", 2.0), ("path", 3.0)])
def test_a_wide_fault_is_named(kind, factor):
    counts = tallied(kind, factor, ranks=(8, 16))
    assert counts["named"] >= 0.9 * counts["jobs"]


def test_clean_jobs_name_nobody_and_early_ranks_are_not_blamed():
    clean, early = tallied("clean"), tallied("early")
    assert 1000 * clean["others"] <= 3 * clean["windows"]
    assert early["blamed"] <= 0.05 * early["jobs"]


@pytest.mark.parametrize("kind", ["racks 3+1", "racks 6+2"])
def test_two_racks_are_no_fault(kind):
    job = ServingCase("steady", 16, kind).job(UNSEEN_SEEDS)
    assert job.fault is None and len(set(job.node_of_rank)) == {"racks 3+1": 4, "racks 6+2": 8}[kind]
    assert len(job.slow_pairs) == {"racks 3+1": 3, "racks 6+2": 12}[kind]
    assert tallied(kind, ranks=(16,), most=2)["others"] <= 1, "without tiers, each job has some"


@pytest.mark.parametrize(
    ("family", "kind", "seed"),
    [
        ("heavy", "racks 3+1", 50032),  # links inside the smaller rack
        ("heavy", "racks 6+2", 50032),  # the same, where each of its nodes seems to be a rack
        ("heavy", "racks 6+2", 50002),  # a rank of the smaller rack, where the step between racks is small
        ("autoregressive", "racks 3+1", 50004),  # a rank in whose links the noise stays
    ],
)
def test_noise_among_racks_is_no_fault(family, kind, seed):
    job = ServingCase(family, 16, kind).job(seed)
    assert not Report.of_records(play_records(job)).findings


@pytest.mark.parametrize("seed", [50005, 50023, 50029, 50037])
def test_a_slow_link_among_two_nodes_of_two_ranks_is_named(seed):
    """Not its receiver, for which all wait."""
    job = ServingCase("autoregressive", 4, "point", 3.0).job(seed)
    (finding,) = Report.of_records(play_records(job)).findings
    assert job.fault is not None and is_named(job.fault, finding)


def test_the_table_keeps_seen_and_unseen_apart():
    rows = [tally(case, 0, 1) for case in cases(["steady", "diurnal"], [4], ["clean"])]
    assert [(row["families"], row["jobs"]) for row in summary(rows)] == [("seen", 4), ("unseen", 4)]
