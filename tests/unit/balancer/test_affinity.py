"""Traffic between nodes, and plans for less of it, against slow counts and exhaustive search."""

from itertools import combinations

import numpy as np
import pytest
from eprt.balancer import Placement, RoutingTrace, plan, traffic_per_token
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.balancing.synthetic_load import topic_trace
from tests.unit.balancer.cases import check_placement, constraints, examples, largest_time, loads, shapes, traces
from tests.unit.balancer.traffic_oracle import fewest_visits, messages, traffic, visits


def scattered(seed, num_layers=2, num_experts=12, num_gpus=8, num_nodes=4, num_slots=24):
    """A valid placement without any order, some slots empty."""
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(num_layers):
        row = np.concatenate([np.arange(num_experts), rng.integers(-1, num_experts, num_slots - num_experts)])
        rows.append(rng.permutation(row))
    return Placement(np.array(rows), num_gpus, num_nodes)


@pytest.mark.parametrize("known", [False, True], ids=["any source", "known sources"])
@pytest.mark.parametrize("num_nodes", [2, 3, 4, 5, 7, 8, 10])
def test_traffic_is_what_a_slow_count_finds(num_nodes, known):
    shape = {"num_gpus": 2 * num_nodes, "num_nodes": num_nodes, "num_slots": 12 if num_nodes < 4 else 4 * num_nodes}
    for seed in range(3):
        placement, trace = scattered(seed, **shape), traces(2, 12, seed, 2 * num_nodes if known else None)
        copies = traffic_per_token(placement, trace)
        sent = traffic_per_token(placement, trace, "expert_messages")
        for layer in range(2):
            assert sent[layer] == pytest.approx(traffic(placement, trace, layer, messages))
            least = traffic(placement, trace, layer, fewest_visits)
            if num_nodes <= 8:
                assert copies[layer] == pytest.approx(least)
            else:
                assert copies[layer] == pytest.approx(traffic(placement, trace, layer, visits))
                assert least <= copies[layer] + 1e-12 <= least * 1.05 + 1e-9, "the greedy choice is near the best"


def test_a_matrix_counts_messages_exactly_and_copies_of_pairs():
    trace = topic_trace(2, 3000, 16, top_k=4, strength=1.5, num_topics=4)
    placement = scattered(0, num_experts=16)
    matrix = trace.coactivation(16)
    np.testing.assert_allclose(
        traffic_per_token(placement, matrix, "expert_messages"), traffic_per_token(placement, trace, "expert_messages")
    )
    pairs = RoutingTrace(
        tuple(
            np.array([pair for row in idx for pair in combinations(row, 2)], dtype=np.int32) for idx in trace.topk_idx
        )
    )
    np.testing.assert_allclose(
        traffic_per_token(placement, matrix), traffic_per_token(placement, pairs) * 6 / 3, rtol=1e-6
    )


def two_camps(num_tokens=200):
    """Tokens choose among the even experts or among the odd ones."""
    rng = np.random.default_rng(0)
    rows = [rng.permutation(4)[:3] * 2 + token % 2 for token in range(num_tokens)]
    return RoutingTrace((np.array(rows, dtype=np.int32),))


@pytest.mark.parametrize("as_matrix", [False, True], ids=["trace", "matrix"])
def test_experts_chosen_together_come_to_one_node(as_matrix):
    trace = two_camps()
    load_LE = trace.load(8)
    placement = plan(
        load_LE,
        num_gpus=4,
        num_nodes=2,
        coactivation=trace.coactivation(8) if as_matrix else trace,
        balance_allowance=0.1,
    )
    nodes = placement.physical_to_logical_map.reshape(2, 4) % 2
    assert (nodes == nodes[:, :1]).all() and nodes[0, 0] != nodes[1, 0]
    assert traffic_per_token(placement, trace)[0] == 0.5  # the own node or the other one, nothing else
    assert placement.metrics["policy"] == "affinity"
    if not as_matrix:
        assert placement.metrics["traffic_per_token"] == 0.5
        assert placement.metrics["traffic_per_token_balance_only"] > 0.8


def divisions(experts, size):
    """All ways to cut the experts into parts of this size."""
    if not experts:
        yield ()
        return
    for rest in combinations(experts[1:], size - 1):
        part = (experts[0], *rest)
        for others in divisions([e for e in experts if e not in part], size):
            yield (*part, *others)


@pytest.mark.parametrize(("num_experts", "num_nodes"), [(8, 2), (6, 3)])
def test_near_the_best_of_all_placements(num_experts, num_nodes):
    """Without spare slots every division is tried."""
    found, best = [], []
    options = {"num_gpus": num_nodes, "num_nodes": num_nodes}
    for seed in range(12):
        trace = traces(1, num_experts, seed, num_tokens=80)
        load_LE = trace.load(num_experts)
        placement = plan(load_LE, coactivation=trace, balance_allowance=0.15, **options)
        cap = 1.15 * largest_time(plan(load_LE, **options), load_LE, options)[0]
        least = np.inf
        for slots in divisions(list(range(num_experts)), num_experts // num_nodes):
            other = Placement(np.array([slots]), num_nodes, num_nodes)
            if largest_time(other, load_LE, options)[0] <= cap:
                least = min(least, traffic(other, trace, 0, fewest_visits))
        found.append(traffic_per_token(placement, trace)[0])
        best.append(least)
        assert found[-1] >= least - 1e-12
    assert np.mean(found) <= 1.02 * np.mean(best), (found, best)


@pytest.mark.parametrize(("num_nodes", "saved"), [(2, 0.12), (4, 0.15), (8, 0.10)])
def test_structure_is_used_and_holds_on_other_tokens(num_nodes, saved):
    shape = dict(num_layers=2, num_experts=64, top_k=6, num_groups=8, top_groups=4, strength=1.5, num_topics=12)
    trace = topic_trace(num_tokens=4096, **shape)
    unseen = topic_trace(num_tokens=4096, token_seed=1, **shape)
    load_LE = trace.load(64)
    options = {"num_gpus": 8, "num_nodes": num_nodes, "num_slots": 80}
    balanced = plan(load_LE, **options)
    placement = plan(load_LE, coactivation=trace, balance_allowance=0.05, **options)
    check_placement(placement, load_LE, options)
    assert (largest_time(placement, load_LE, options) <= 1.05 * largest_time(balanced, load_LE, options)).all()
    before, after = (traffic_per_token(one, unseen).mean() for one in (balanced, placement))
    assert after < (1 - saved) * before


def test_coverage_comes_before_traffic():
    """12 slots, two for each of 6 experts: none is free for a copy that only saves traffic."""
    rng = np.random.default_rng(0)
    load_LE = np.array([[850.0, 636, 511, 269, 307, 40], [75, 16, 175, 813, 649, 912]])
    for num_nodes in (2, 3):
        for _ in range(20):
            trace = RoutingTrace(tuple(rng.integers(0, 6, (2, 50, 2))))
            options = {"num_slots": 12, "num_gpus": num_nodes, "num_nodes": num_nodes, "min_gpus_per_expert": 2}
            assert plan(load_LE, coactivation=trace, balance_allowance=1.0, **options).replica_count.min() == 2


def test_the_knob_trades_balance_for_traffic():
    trace = topic_trace(3, 4096, 64, 6, strength=1.5, num_topics=12, skew=0.5)
    load_LE = trace.load(64)
    options = {"num_gpus": 16, "num_nodes": 4, "num_slots": 80}
    crossings = [
        plan(load_LE, coactivation=trace, balance_allowance=knob, **options).metrics["traffic_per_token"]
        for knob in (0.0, 0.1, 0.5)
    ]
    assert crossings[2] < crossings[1] < crossings[0]


def test_messages_are_saved_by_replicas_near_the_tokens():
    """Tokens of node 0 choose experts 0 to 3, of node 1 the others; each node has room for all."""
    rng = np.random.default_rng(1)
    source = rng.integers(2, size=400)
    topk = np.stack([rng.permutation(4)[:2] + 4 * node for node in source]).astype(np.int32)
    trace = RoutingTrace((topk,), (source.astype(np.int32),))
    swapped = RoutingTrace((topk,), ((1 - source).astype(np.int32),))
    for one in (trace, swapped):
        placement = plan(
            trace.load(8), num_gpus=2, num_nodes=2, coactivation=one, traffic="expert_messages", balance_allowance=0.2
        )
        assert traffic_per_token(placement, one, "expert_messages")[0] == 0


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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"coactivation": np.ones((1, 8, 7))}, r"coactivation has shape \(1, 8, 7\).*= \(1, 8, 8\)"),
        ({"coactivation": -np.ones((1, 8, 8))}, r"coactivation\[layer 0, expert 0, expert 0\] = -1.0: must be finite"),
        ({"coactivation": np.triu(np.ones((1, 8, 8)))}, r"\[layer 0, expert 0, expert 1\] = 1.0: must be equal"),
        (
            {"coactivation": RoutingTrace((np.array([[0, 8]]),))},
            r"\[layer 0, token 0, choice 1\] = 8: .*experts 0 to 7",
        ),
        ({"coactivation": RoutingTrace((np.array([[0, 1]]),) * 2)}, "the trace has 2 layers, load_LE has 1"),
        (
            {"coactivation": RoutingTrace((np.array([[0, 1]]),), (np.array([4]),))},
            r"source_gpu\[layer 0, token 0\] = 4: must be from 0 to 3; leave out source_gpu",
        ),
        ({"traffic": "bytes"}, "traffic='bytes': must be one of node_copies, expert_messages"),
        ({"balance_allowance": -0.1}, "balance_allowance=-0.1"),
        ({"balance_allowance": float("nan")}, "balance_allowance=nan"),
    ],
)
def test_bad_input_is_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        plan(np.ones((1, 8)), num_gpus=4, num_nodes=2, **arguments)


def test_too_many_nodes_are_named():
    with pytest.raises(ValueError, match="num_nodes=128: traffic is counted for at most 64 nodes"):
        plan(np.ones((1, 128)), num_gpus=128, num_nodes=128, coactivation=RoutingTrace((np.array([[0, 1]]),)))
