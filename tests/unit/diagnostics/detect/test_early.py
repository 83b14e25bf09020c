"""Early ranks: told as such, never blamed, and a faster rank to the balancer."""

import numpy as np
import pytest
from eprt.diagnostics import Report, rank_speeds
from eprt.diagnostics.text import to_text

from benchmarks.diagnosis.serving_job import ServingFault, ServingJob, play_records


def report(num_ranks: int, seed: int = 0, factor: float = 0.6) -> Report:
    job = ServingJob(num_ranks, "steady", seed, fault=ServingFault("early", factor, (2,)))
    return Report.of_records(play_records(job))


@pytest.mark.parametrize("num_ranks", [4, 8, 16])
@pytest.mark.parametrize("seed", range(3))
def test_a_faster_rank_is_early_and_nobody_is_blamed(num_ranks, seed):
    """It used to be a slow receiver with a confidence of 1: "check its network card"."""
    found = report(num_ranks, seed)
    assert found.findings == ()
    (early,) = found.early
    assert early.rank == 2 and early.ratio < 0.7 and early.waits_ratio > 1.3 and early.compute_ratio < 0.75
    assert "faster than its peers" in early.evidence and "Not a fault" in early.evidence
    assert found.to_json()["early"][0]["rank"] == 2
    assert "rank 2 is early" in to_text(found.to_json(), None, colour=False)


def test_it_is_faster_for_as_long_as_it_takes_less_time():
    found = report(8)
    speeds_N = rank_speeds(found)
    assert speeds_N[2] == pytest.approx(1 / 0.6, rel=0.1) and (np.delete(speeds_N, 2) == 1).all()
    calm = Report.of_records(play_records(ServingJob(8, "steady", 0)))
    assert rank_speeds(calm, speeds_N).tolist() == [1.0] * 8
    relieved = Report.from_matrices(found.matrices.first(12))
    assert rank_speeds(relieved, speeds_N)[2] == pytest.approx(speeds_N[2])


def test_a_slow_receiver_is_still_a_finding():
    job = ServingJob(8, "steady", 1, fault=ServingFault("row", 2.0, (2,)))
    found = Report.of_records(play_records(job))
    assert found.early == () and [finding.rank for finding in found.findings] == [2]
