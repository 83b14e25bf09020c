"""The placement that serves after a part of a migration."""

import numpy as np
import pytest
from eprt.balancer import Placement
from eprt.balancer.job import PlanRequest, solve
from eprt.balancer.migration import Round

from eprt.ep.migration.job import MigrationJob
from eprt.serve.ranks.recovery import CapacityError
from eprt.serve.rebalance.migration import placement_after, placement_without, with_a_commit


def test_a_layer_that_a_migration_did_not_come_to_keeps_its_weights():
    """Rolled back in its second round: the first layer is there, the second half way, the third as it was."""
    row, half, new = (0, 1, 0, 2), (1, 1, 0, 2), (1, 0, 0, 2)
    before = Placement(np.array([row] * 3), num_gpus=2, slot_weight=np.array([[0.9, 1, 0.1, 1]] * 3))
    target = Placement(np.array([new] * 3), num_gpus=2)
    rounds = (Round({0: new, 1: half}, ()), Round({1: new, 2: new}, ()))
    job = MigrationJob(1, 0, rounds, {layer: (1, 0.7, 0.3, 1) for layer in range(3)})
    for rounds_done, rows, weights in (
        (0, [row, row, row], [[0.9, 1, 0.1, 1]] * 3),
        (1, [new, half, row], [[1, 0.7, 0.3, 1], [0.5, 0.5, 1, 1], [0.9, 1, 0.1, 1]]),
        (2, [new, new, new], [[1, 0.7, 0.3, 1]] * 3),
    ):
        after = placement_after(before, job, rounds_done, target)
        assert after.physical_to_logical_map.tolist() == list(map(list, rows)) and after.epoch == rounds_done
        np.testing.assert_allclose(after.weight_LP, weights)


def test_a_plan_without_rounds_gets_a_commit_that_moves_nothing():
    serves = Placement(np.array([[0, 1, 2, 0], [2, 1, 0, 2]]), num_gpus=2)
    answer = solve(PlanRequest(serves, serves))
    assert not answer.rounds
    committed = with_a_commit(answer, serves)
    job = MigrationJob(1, 0, committed.rounds, committed.weights)
    assert len(job.rounds) == 1 and not job.rounds[0].waves
    after = placement_after(serves, job, 1, serves)
    assert after.epoch == 1
    np.testing.assert_array_equal(after.physical_to_logical_map, serves.physical_to_logical_map)
    np.testing.assert_array_equal(after.weight_LP, serves.weight_LP)


def test_a_placement_without_a_rank_gives_others_what_only_it_holds():
    before = Placement(np.array([[0, 1, 2, 0, -1, 1], [0, 1, 2, 0, 1, 2]]), num_gpus=3)
    after = placement_without(before, 1)
    assert after is not None
    assert after.physical_to_logical_map.tolist() == [[0, 1, 2, 0, 2, 1], [0, 1, 2, 0, 1, 2]]
    assert placement_without(after, 1) is None
    with pytest.raises(CapacityError, match="1 rank of 2 slots"):
        placement_without(Placement(np.array([[0, 1, 2, 0]]), num_gpus=2), 1)
