"""Drawn plans keep every promise. `make properties` (--hypothesis-profile=thorough) tries 20,000 of each kind; without
it, enough for every change."""

import numpy as np
import pytest
from eprt.balancer import moved_slots, plan, rebalance_experts
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.balancer.cases import (
    THOROUGH,
    check_placement,
    constraints,
    examples,
    largest_time,
    loads,
    shapes,
    traces,
)
from tests.unit.balancer.eplb_oracle import eplb_layer
from tests.unit.balancer.eplb_oracle import largest_load as largest_load_of_eplb

pytestmark = pytest.mark.timeout(0 if THOROUGH else 300)


@examples(80)
@given(st.data())
def test_eplb_is_the_oracles(data):
    num_experts, arguments = data.draw(shapes())
    load_LE = data.draw(loads(num_experts))
    shape = tuple(arguments[name] for name in ("num_slots", "num_groups", "num_nodes", "num_gpus"))
    phy2log, log2phy, logcnt = rebalance_experts(load_LE, *shape)
    for layer, load_E in enumerate(load_LE):
        want = eplb_layer(load_E, *shape)
        assert phy2log[layer].tolist() == [expert for expert, _ in want]
        assert logcnt[layer].tolist() == np.bincount(phy2log[layer], minlength=num_experts).tolist()
        for slot, (expert, replica) in enumerate(want):
            assert log2phy[layer, expert, replica] == slot
    assert (log2phy >= 0).sum() == phy2log.size and log2phy.shape[2] == logcnt.max()


@examples(120)
@given(st.data())
def test_plans_are_valid_and_never_worse_than_eplb(data):
    num_experts, arguments = data.draw(shapes())
    load_LE = data.draw(loads(num_experts))
    limits = data.draw(constraints(len(load_LE), num_experts, arguments))
    try:
        placement = plan(load_LE, **arguments, **limits)
    except ValueError as error:  # whole groups may not fit what is left of the nodes; then it must say so
        assert limits and arguments["num_groups"] > 1 and "whole groups" in str(error)
        arguments["num_groups"] = 1
        placement = plan(load_LE, **arguments, **limits)
    check_placement(placement, load_LE, {**arguments, **limits})
    if not limits:
        assert placement.physical_to_logical_map.min() >= 0, "every slot is used"
        shape = tuple(arguments[name] for name in ("num_slots", "num_groups", "num_nodes", "num_gpus"))
        for load_E, largest in zip(load_LE, largest_time(placement, load_LE, arguments)):
            assert largest <= largest_load_of_eplb(eplb_layer(load_E, *shape), load_E, shape[3]) * (1 + 1e-9)
    again = plan(load_LE, **arguments, **limits)
    np.testing.assert_array_equal(placement.physical_to_logical_map, again.physical_to_logical_map)
    np.testing.assert_array_equal(placement.weight_LP, again.weight_LP)


@examples(100)
@given(st.data())
def test_affinity_stays_inside_its_allowance(data):
    num_experts, arguments = data.draw(shapes(nodes=(1, 2, 3, 4, 5, 7, 8, 9)))
    load_LE = data.draw(loads(num_experts))
    limits = data.draw(constraints(len(load_LE), num_experts, {**arguments, "num_groups": 1}))
    arguments["num_groups"] = 1 if limits else arguments["num_groups"]
    sources = data.draw(st.sampled_from([None, arguments["num_gpus"]]))
    trace = traces(len(load_LE), num_experts, data.draw(st.integers(0, 1000)), sources)
    objective = data.draw(st.sampled_from(["node_copies", "expert_messages"]))
    allowance = data.draw(st.sampled_from([0.0, 0.02, 0.1, 1.0]))
    given_trace = trace if data.draw(st.booleans()) else trace.coactivation(num_experts)
    knob = {"coactivation": given_trace, "traffic": objective, "balance_allowance": allowance}
    balanced = plan(load_LE, **arguments, **limits)
    placement = plan(load_LE, **arguments, **limits, **knob)
    check_placement(placement, load_LE, {**arguments, **limits})
    allowed_L = (1 + allowance) * largest_time(balanced, load_LE, {**arguments, **limits})
    assert (largest_time(placement, load_LE, {**arguments, **limits}) <= allowed_L * (1 + 1e-9)).all()
    assert placement.metrics["traffic_per_token"] <= placement.metrics["traffic_per_token_balance_only"] + 1e-9
    again = plan(load_LE, **arguments, **limits, **knob)
    np.testing.assert_array_equal(placement.physical_to_logical_map, again.physical_to_logical_map)


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
