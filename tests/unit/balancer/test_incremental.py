"""Incremental plans: repairs, budgets of moves and bytes, balance before traffic."""

import numpy as np
import pytest
from eprt.balancer import Placement, moved_slots, plan, traffic_per_token
from eprt.balancer.incremental import default_moves
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.balancing.synthetic_load import topic_trace
from tests.unit.balancer.cases import (
    LOAD_LE,
    check_placement,
    constraints,
    examples,
    largest_time,
    loads,
    shapes,
    traces,
)


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


def test_increments_follow_the_trace_within_their_budget():
    trace = topic_trace(2, 2048, 32, 4, strength=1.5, num_topics=8)
    load_LE = trace.load(32)
    options = {"num_gpus": 8, "num_nodes": 4, "num_slots": 40}
    current = plan(load_LE, **options)
    crossings = [traffic_per_token(current, trace).mean()]
    for _ in range(3):
        after = plan(load_LE, current=current, coactivation=trace, max_moves_per_layer=4, **options)
        assert (moved_slots(current, after).sum(1) <= 4).all()
        assert after.metrics["moves_for_traffic"] > 0
        crossings.append(traffic_per_token(after, trace).mean())
        assert after.metrics["traffic_per_token"] == pytest.approx(crossings[-1])
        assert after.metrics["traffic_per_token_before"] == pytest.approx(crossings[-2])
        current = after
    assert crossings == sorted(crossings, reverse=True) and crossings[-1] < 0.95 * crossings[0]


def test_balance_comes_before_traffic_in_a_budget():
    """The load has turned upside down: the few moves all go to balance."""
    trace = topic_trace(1, 2048, 32, 4, strength=1.5, num_topics=8)
    options = {"num_gpus": 8, "num_nodes": 4, "num_slots": 40}
    load_LE = np.random.default_rng(0).lognormal(sigma=1.5, size=(1, 32))
    current = plan(load_LE[:, ::-1], **options)
    alone = plan(load_LE, current=current, max_moves_per_layer=3, balance_allowance=0.0, **options)
    both = plan(load_LE, current=current, max_moves_per_layer=3, coactivation=trace, balance_allowance=0.0, **options)
    assert both.metrics["moves_for_traffic"] == 0
    np.testing.assert_array_equal(alone.physical_to_logical_map, both.physical_to_logical_map)


@examples(120)
@given(st.data())
def test_increments_keep_budget_and_allowance(data):
    num_experts, arguments = data.draw(shapes())
    num_layers = data.draw(st.integers(1, 3))
    before_LE = data.draw(loads(num_experts, num_layers))
    load_LE = data.draw(loads(num_experts, num_layers))
    current = plan(before_LE, **arguments)
    limits = data.draw(constraints(num_layers, num_experts, {**arguments, "num_groups": 1}))
    budget = data.draw(
        st.sampled_from([{}, {"max_moves_per_layer": 0}, {"max_moves_per_layer": 3}, {"max_moves_per_layer": 50}])
    )
    if data.draw(st.booleans()):
        budget = {**budget, "max_bytes": data.draw(st.sampled_from([0, 5, 40])), "bytes_per_expert": 2.0}
    alone = plan(load_LE, current=current, **arguments, **limits, **budget)
    trace = traces(num_layers, num_experts, data.draw(st.integers(0, 1000)))
    allowance = data.draw(st.sampled_from([0.0, 0.05, 0.5]))
    knob = {"coactivation": trace, "balance_allowance": allowance}
    both = plan(load_LE, current=current, **arguments, **limits, **budget, **knob)
    for placement in (alone, both):
        check_placement(placement, load_LE, {**arguments, **limits})
        moved_L = moved_slots(current, placement).sum(1)
        repairs = placement.metrics["repairs"]
        assert (moved_L <= budget.get("max_moves_per_layer", 8 if "max_bytes" not in budget else 10**6) + repairs).all()
        assert moved_L.sum() <= placement.metrics["moves"]
        if "max_bytes" in budget:
            assert (placement.metrics["moves"] - repairs) * 2.0 <= budget["max_bytes"]
            assert placement.metrics["bytes"] == placement.metrics["moves"] * 2.0
        changed = bool((placement.physical_to_logical_map != current.physical_to_logical_map).any())
        assert placement.epoch == current.epoch + changed
    if not limits:
        assert alone.metrics["repairs"] == 0
        # Weights are chosen anew, so that even a plan without a move is no worse than what is in force.
        assert (largest_time(alone, load_LE, {}) <= largest_time(current, load_LE, {}) * 1.001).all()
    limit_L = (1 + allowance) * largest_time(alone, load_LE, {**arguments, **limits})
    assert (largest_time(both, load_LE, {**arguments, **limits}) <= limit_L * (1 + 1e-9)).all()


def test_the_default_budget_grows_with_the_gpus_where_slots_are_few():
    assert [default_moves(num_gpus, 4) for num_gpus in (8, 24, 27, 144)] == [8, 8, 9, 48]
    assert default_moves(144, 5) == 8


def test_bytes_are_spent_where_they_gain_most():
    """Two layers of one hot expert each; the budget pays for one move, or for the cheaper layer's alone."""
    load_LE = np.ones((2, 6))
    load_LE[:, 0] = 9, 5
    current = Placement(np.array([[0, 1, 2, 3, 4, 5, 4, 5]] * 2), num_gpus=4)
    options = {"num_gpus": 4, "current": current, "max_moves_per_layer": 1}
    moved_L = moved_slots(current, plan(load_LE, **options)).sum(1)
    assert moved_L.tolist() == [1, 1]
    moved_L = moved_slots(current, plan(load_LE, **options, max_bytes=10, bytes_per_expert=10)).sum(1)
    assert moved_L.tolist() == [1, 0], "the larger gain first"
    moved_L = moved_slots(current, plan(load_LE, **options, max_bytes=10, bytes_per_expert=[20, 10])).sum(1)
    assert moved_L.tolist() == [0, 1], "a move that costs more than is left is skipped"
    none = plan(load_LE, **options, max_bytes=0, bytes_per_expert=1)
    assert none.metrics["bytes"] == none.metrics["moves"] == 0 and none.epoch == current.epoch


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_moves_per_layer": 2}, "max_moves_per_layer and max_bytes .*need current"),
        ({"max_bytes": 2}, "max_moves_per_layer and max_bytes .*need current"),
        ({"current": True, "max_moves_per_layer": -1}, "max_moves_per_layer=-1: must be an integer of at least 0"),
        ({"current": True, "max_moves_per_layer": 1.5}, r"max_moves_per_layer=1\.5: must be an integer"),
        ({"current": True, "max_bytes": -1.0, "bytes_per_expert": 1}, r"max_bytes=-1\.0: must be at least 0"),
        ({"current": True, "max_bytes": 1.0}, "max_bytes needs bytes_per_expert"),
        ({"current": True, "bytes_per_expert": [1, 0, 1]}, r"bytes_per_expert\[layer 1\] = 0\.0: must be above 0"),
        ({"current": True, "min_gain": float("nan")}, "min_gain=nan: must be finite"),
    ],
)
def test_a_bad_budget_is_named(arguments, message):
    if "current" in arguments:
        arguments = {**arguments, "current": Placement.contiguous(3, 32, 8)}
    with pytest.raises(ValueError, match=message):
        plan(LOAD_LE, num_gpus=8, **arguments)
