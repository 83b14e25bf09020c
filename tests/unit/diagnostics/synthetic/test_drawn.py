"""Faults and burdens of drawn jobs change what they say and nothing else, compared with the same job without them."""

from dataclasses import replace

import numpy as np
import pytest
from eprt.diagnostics.synthetic import FAULT_KINDS, PlantedFault, SyntheticJob, generate
from eprt.diagnostics.synthetic.job import NODE_FACTOR, USUAL_WAIT_US

JOB = SyntheticJob(6, 5, 3, ranks_per_node=3)
LINKS = ~np.eye(6, dtype=bool)


def fault_of(kind: str, cause: str) -> PlantedFault:
    place = {"src": 1, "dst": 4} if kind == "point" else {"rank": 2}
    return PlantedFault(kind, cause=cause, factor=3.0, windows=(2, 3), **place)


@pytest.mark.parametrize(("kind", "cause"), FAULT_KINDS)
def test_a_fault_lengthens_its_place_in_its_windows(kind, cause):
    fault = fault_of(kind, cause)
    clean, faulty = generate(JOB), generate(replace(JOB, faults=(fault,)))
    expected = np.ones((5, 6, 6))
    where = {"column": np.s_[2:4, :, 2], "row": np.s_[2:4, 2, :], "point": np.s_[2:4, 1, 4]}[kind]
    expected[where] = 3.0
    if kind == "column" and cause != "comm":  # a late rank waits for nobody
        expected[2:4, 2, :] = 1 / 3
    np.testing.assert_allclose(faulty.wait_us_WNN[:, LINKS] / clean.wait_us_WNN[:, LINKS], expected[:, LINKS])
    computes_longer = (faulty.compute_us_WN / clean.compute_us_WN > 2).nonzero()
    assert np.transpose(computes_longer).tolist() == ([[2, 2], [3, 2]] if kind == "column" and cause != "comm" else [])
    assert (faulty.recv_tokens_WNN > clean.recv_tokens_WNN).any() == (cause == "mixed")


def test_waits_between_nodes_are_longer_and_nobody_waits_for_itself():
    matrices = generate(replace(JOB, num_windows=400))
    mean_us_NN = np.median(matrices.wait_us_WNN, axis=0)
    assert mean_us_NN[0, 1] == pytest.approx(USUAL_WAIT_US, rel=0.1)
    assert mean_us_NN[0, 5] == pytest.approx(USUAL_WAIT_US * NODE_FACTOR, rel=0.1)
    assert not matrices.wait_us_WNN[:, range(6), range(6)].any()


def test_idle_ranks_send_nothing_and_are_early():
    clean, idle = generate(JOB), generate(replace(JOB, idle=(1,)))
    assert not idle.sent_tokens_WNN[:, 1].any() and idle.sent_tokens_WNN[:, 0].all()
    assert (idle.wait_us_WNN[:, 0, 1] < clean.wait_us_WNN[:, 0, 1]).all()


def test_uneven_batches_make_ranks_late_as_far_as_they_are_larger():
    skewed = generate(replace(JOB, batch_skew=0.5, cv=0.01))
    tokens_N = skewed.sent_tokens_WNN.sum(axis=(0, 2))
    awaited_N = skewed.wait_us_WNN[:, :3, :3].sum(axis=(0, 1))
    assert np.argsort(tokens_N[:3]).tolist() == np.argsort(awaited_N).tolist()


def test_a_migration_is_one_window_in_which_everybody_waits_longer():
    clean, moving = generate(JOB), generate(replace(JOB, migration=2))
    ratio_WX = moving.wait_us_WNN[:, LINKS] / clean.wait_us_WNN[:, LINKS]
    np.testing.assert_allclose(ratio_WX[[0, 1, 3, 4]], 1.0)
    assert set(ratio_WX[2].round(6)) == {1.5, 6.0}
