"""Simulated serving jobs: a fault lengthens the waits at its place by its factor."""

import numpy as np
import pytest

from benchmarks.diagnosis.serving_job import ServingFault, ServingJob, play_records

NODES = (0, 0, 0, 0, 1, 1, 1, 1)


def waits_of(fault: ServingFault | None, **changes) -> np.ndarray:
    records = play_records(ServingJob(8, "steady", 3, node_of_rank=NODES, fault=fault, **changes))
    totals = np.array([np.add(one.dispatch_wait_us, one.combine_wait_us) for one in records])
    return (totals / np.array([[one.num_calls] for one in records])).reshape(-1, 8, 8)


@pytest.mark.parametrize(
    ("fault", "place"),
    [
        (ServingFault("column comp", 2.0, (1,)), (slice(None), 1)),
        (ServingFault("column comm", 3.0, (1,)), (slice(None), 1)),
        (ServingFault("row", 2.0, (1,)), (1, slice(None))),
        (ServingFault("point", 3.0, (1, 6)), (1, 6)),
        (ServingFault("path", 3.0, (0, 1)), (slice(0, 4), slice(4, 8))),
    ],
)
def test_the_waits_at_the_place_are_longer_by_the_factor(fault, place):
    waits_WNN, usual_WNN = waits_of(fault), waits_of(None)
    at = (slice(4, None), *place)
    usual, now = usual_WNN[at], waits_WNN[at]
    assert now[now > 0].mean() / usual[usual > 0].mean() == pytest.approx(fault.factor, rel=0.25)
    np.testing.assert_allclose(waits_WNN[:4], usual_WNN[:4])


def test_who_is_late_waits_less_and_who_is_early_waits_longer():
    usual_WNN = waits_of(None)[4:]
    late_WNN = waits_of(ServingFault("column comp", 2.0, (1,)))[4:]
    early_WNN = waits_of(ServingFault("early", 0.6, (1,)))[4:]
    assert late_WNN[:, 1].mean() < 0.7 * usual_WNN[:, 1].mean()
    assert early_WNN[:, 1].mean() > 1.5 * usual_WNN[:, 1].mean()
    assert early_WNN[:, :, 1].mean() < 0.6 * usual_WNN[:, :, 1].mean()


def test_a_longer_call_leaves_fewer_calls_in_a_window():
    records = play_records(ServingJob(4, "steady", 0, fault=ServingFault("job", 2.0)))
    calls_W = [one.num_calls for one in records if one.rank == 0]
    assert np.mean(calls_W[4:]) == pytest.approx(np.mean(calls_W[:4]) / 2, rel=0.1)


def test_racks_are_further_apart():
    assert waits_of(None, slow_pairs=((0, 1),))[:, :4, 4:].mean() > 1.5 * waits_of(None)[:, :4, 4:].mean()


def test_a_fault_that_does_not_exist():
    with pytest.raises(ValueError, match="fault 'colum': one of column comp, "):
        play_records(ServingJob(4, "steady", 0, fault=ServingFault("colum", 2.0, (1,))))
