"""Each constraint and option of plan() by what it is for."""

import numpy as np
import pytest
from eprt.balancer import Placement, moved_slots, plan

from tests.unit.balancer.cases import check_placement, largest_time

LOAD_LE = np.random.default_rng(3).lognormal(sigma=0.8, size=(3, 32))


@pytest.mark.parametrize("num_groups", [1, 8], ids=["global", "hierarchical"])
@pytest.mark.parametrize("how", ["from scratch", "incremental"])
def test_covered_experts_survive_the_loss_of_any_gpu(num_groups, how):
    options = {"num_gpus": 8, "num_nodes": 2, "num_slots": 80, "num_groups": num_groups}
    current = None if how == "from scratch" else plan(LOAD_LE, **options)
    placement = plan(LOAD_LE, current=current, min_gpus_per_expert=2, **options)
    check_placement(placement, LOAD_LE, {**options, "min_gpus_per_expert": 2})
    slots_LGS = placement.physical_to_logical_map.reshape(3, 8, 10)
    for lost in range(8):
        for left_GS in np.delete(slots_LGS, lost, axis=1):
            assert set(range(32)) <= set(left_GS.ravel())
    assert placement.metrics["max_over_mean"] < 1.1
    if current is not None:
        needed = int(np.maximum(0, 2 - current.replica_count).sum())
        assert placement.metrics["repairs"] == needed, "no more repairs than experts with a single copy"


def test_unequal_gpus_get_load_in_proportion():
    speed_G = np.array([1.0, 1.0, 1.0, 1.0, 0.5, 0.5, 2.0, 1.0])
    placement = plan(LOAD_LE, num_gpus=8, num_slots=80, gpu_speed=speed_G)
    share_LG = placement.gpu_load(LOAD_LE) / LOAD_LE.sum(1, keepdims=True)
    np.testing.assert_allclose(share_LG, np.tile(speed_G / speed_G.sum(), (3, 1)), rtol=0.02)


def test_a_lost_rank_is_repaired_first_and_with_the_fewest_moves():
    options = {"num_gpus": 8, "num_slots": 48}
    current = plan(LOAD_LE, **options)
    speed_G = np.ones(8)
    speed_G[5] = 0
    placement = plan(LOAD_LE, current=current, gpu_speed=speed_G, max_moves_per_layer=0, **options)
    check_placement(placement, LOAD_LE, {**options, "gpu_speed": speed_G})
    lost_LS = current.physical_to_logical_map.reshape(3, 8, 6)[:, 5]
    alone = sum(int((current.replica_count[layer, row] == 1).sum()) for layer, row in enumerate(lost_LS))
    assert placement.metrics["repairs"] == placement.metrics["moves"] == alone > 0
    assert moved_slots(current, placement).sum() == alone
    back = plan(LOAD_LE, current=placement, **options)
    assert back.metrics["max_over_mean"] < placement.metrics["max_over_mean"]


def test_spare_slots_may_differ_by_layer_and_gpu():
    usable_LG = np.array([[6] * 8, [5] * 8, [4, 6, 4, 6, 4, 6, 4, 6]])
    placement = plan(LOAD_LE, num_gpus=8, num_slots=48, usable_slots=usable_LG)
    check_placement(placement, LOAD_LE, {"num_gpus": 8, "num_slots": 48, "usable_slots": usable_LG})
    held_LG = (placement.physical_to_logical_map.reshape(3, 8, 6) >= 0).sum(2)
    np.testing.assert_array_equal(held_LG, usable_LG)
    # Fewer than now: what is too much goes, copies before last ones.
    shrunk = plan(LOAD_LE, current=plan(LOAD_LE, num_gpus=8, num_slots=48), num_gpus=8, usable_slots=4)
    assert ((shrunk.physical_to_logical_map.reshape(3, 8, 6) >= 0).sum(2) == 4).all()
    assert (shrunk.replica_count == 1).all()


def test_without_redundancy_experts_change_places():
    options = {"num_gpus": 8, "num_slots": 32}
    start = Placement.contiguous(3, 32, 8)
    placement = plan(LOAD_LE, current=start, max_moves_per_layer=32, **options)
    assert (placement.replica_count == 1).all() and placement.physical_to_logical_map.min() >= 0
    before, after = largest_time(start, LOAD_LE, options), largest_time(placement, LOAD_LE, options)
    # The busiest expert bounds what changing places can do.
    assert (after < before).all() and (after <= 1.15 * np.maximum(LOAD_LE.sum(1) / 8, LOAD_LE.max(1))).all()


def test_hierarchical_increments_leave_a_copy_of_each_expert_at_its_group():
    options = {"num_gpus": 8, "num_nodes": 4, "num_slots": 48, "num_groups": 4}
    current = plan(LOAD_LE, **options)
    home_LE = current.logical_to_physical_map[:, :, 0] // 12
    for seed in range(4):
        load_LE = np.random.default_rng(seed).lognormal(sigma=1.2, size=LOAD_LE.shape)
        current = plan(load_LE, current=current, max_moves_per_layer=12, **options)
        for layer, expert in np.ndindex(3, 32):
            slots = current.logical_to_physical_map[layer, expert]
            assert home_LE[layer, expert] in slots[slots >= 0] // 12


def test_seeds_break_ties_and_threads_change_nothing():
    load_LE = np.ones((4, 32))
    load_LE[:, :4] = 3.0
    options = {"num_gpus": 8, "num_slots": 48}
    plans = [plan(load_LE, seed=seed, **options).physical_to_logical_map for seed in (0, 0, 1)]
    np.testing.assert_array_equal(plans[0], plans[1])
    assert (plans[0] != plans[2]).any()
    one, many = (plan(LOAD_LE, threads=threads, **options).physical_to_logical_map for threads in (1, 3))
    np.testing.assert_array_equal(one, many)
