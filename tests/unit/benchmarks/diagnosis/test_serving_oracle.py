"""The oracle names what it has learned to see, wherever it is, and keeps to its false findings."""

import numpy as np
import pytest
from eprt.diagnostics.windows.window_sums import WindowSums

from benchmarks.diagnosis.bench_serving_faults import ONSET, ServingCase
from benchmarks.diagnosis.serving_job import play_records
from benchmarks.diagnosis.serving_oracle import ONSETS, Oracle, features

NUM_RANKS, NUM_FEATURES = 4, 3


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    """Of faults that add 8 to the second feature."""
    rng = np.random.default_rng(0)
    clean_JONF = rng.standard_normal((400, len(ONSETS), NUM_RANKS, NUM_FEATURES))
    return Oracle(clean_JONF, rng.standard_normal((40, NUM_FEATURES)) + np.array([0, 8, 0]))


def test_it_names_the_rank_at_whatever_onset(oracle):
    job_ONF = np.random.default_rng(1).standard_normal((len(ONSETS), NUM_RANKS, NUM_FEATURES))
    assert oracle.named(job_ONF) is None
    job_ONF[3, 2, 1] += 8
    assert oracle.named(job_ONF) == 2


def test_of_clean_jobs_it_names_as_many_as_it_may(oracle):
    jobs = np.random.default_rng(2).standard_normal((1000, len(ONSETS), NUM_RANKS, NUM_FEATURES))
    assert 2 <= sum(oracle.named(job) is not None for job in jobs) <= 30, "12 of 1000 jobs of 12 windows"


def test_the_faulty_rank_changes_at_its_onset():
    job = ServingCase("steady", 4, "column comp", 3.0).job(3)
    assert job.fault is not None
    job_ONF = features(WindowSums.from_records(play_records(job)).matrices())
    assert job_ONF.shape[:2] == (len(ONSETS), 4)
    awaited_us_N = job_ONF[ONSETS.index(ONSET), :, 0]
    assert awaited_us_N.argmax() == job.fault.place[0] and awaited_us_N.max() > 20
