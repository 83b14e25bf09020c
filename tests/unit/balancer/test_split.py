"""A batch over replicas: nothing is lost, the balance is the linear program's, tokens stay near, and counts decide."""

import numpy as np
import pytest
from eprt.balancer import Placement, ReplicaTable, assign, plan, split_batch, split_by_weight
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import linprog

from tests.unit.balancer.cases import examples

SKEWS = ("even", "lognormal", "all to one", "empty ranks", "nothing")


def counts(kind: str, num_gpus: int, num_experts: int, tokens: int, rng: np.random.Generator) -> np.ndarray:
    """int64 [S, E]"""
    weight = np.ones(num_experts)
    if kind == "lognormal":
        weight = rng.lognormal(size=num_experts)
    if kind == "all to one":
        weight = np.eye(num_experts)[num_experts // 2]
    count_SE = rng.multinomial(tokens, weight / weight.sum(), size=num_gpus).astype(np.int64)
    if kind == "empty ranks":
        count_SE[::2] = 0
    return count_SE * (kind != "nothing")


@st.composite
def batches(draw):
    """(table, count_SE)"""
    num_nodes, per_node = draw(st.sampled_from([(1, 1), (1, 2), (1, 3), (2, 2), (1, 7), (2, 3)]))
    num_gpus = num_nodes * per_node
    num_experts = draw(st.integers(1, 24))
    fewest = -(-num_experts // num_gpus)
    num_slots = num_gpus * draw(st.integers(fewest, min(num_experts, fewest + 3)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    placement = plan(rng.lognormal(size=(1, num_experts)), num_slots=num_slots, num_gpus=num_gpus, num_nodes=num_nodes)
    count_SE = counts(draw(st.sampled_from(SKEWS)), num_gpus, num_experts, draw(st.integers(1, 200)), rng)
    return ReplicaTable.of_layer(placement, 0), count_SE


def received(table: ReplicaTable, quota_SP: np.ndarray) -> np.ndarray:
    """[S, E]: tokens of each source, expert by expert."""
    return np.stack([quota_SP[:, table.expert_of_slot_P == e].sum(1) for e in range(table.num_experts)], axis=1)


def gpu_loads(table: ReplicaTable, quota_SP: np.ndarray) -> np.ndarray:
    return quota_SP.sum(0).reshape(table.num_gpus, -1).sum(1)


def smallest_largest_load(table: ReplicaTable, count_E: np.ndarray) -> float:
    """The linear program: each expert's tokens in fractions over its slots, the largest GPU load minimal."""
    slots = np.flatnonzero(table.expert_of_slot_P >= 0)
    gpu_rows = np.arange(table.num_gpus)[:, None] == slots // (table.num_slots // table.num_gpus)
    expert_rows = np.arange(table.num_experts)[:, None] == table.expert_of_slot_P[slots]
    solution = linprog(
        np.append(np.zeros(len(slots)), 1.0),
        A_ub=np.hstack([gpu_rows, -np.ones((table.num_gpus, 1))]),
        b_ub=np.zeros(table.num_gpus),
        A_eq=np.hstack([expert_rows, np.zeros((table.num_experts, 1))]),
        b_eq=count_E,
    )
    assert solution.success
    return solution.fun


@examples(120)
@given(batches(), st.sampled_from(["water_filling", "lp"]), st.sampled_from([0.0, 0.1]))
def test_no_token_is_lost_and_loads_are_the_linear_programs(batch, method, slack):
    table, count_SE = batch
    quota_SP = split_batch(table, count_SE, method=method, slack=slack)
    assert quota_SP.min() >= 0
    np.testing.assert_array_equal(received(table, quota_SP), count_SE)
    assert quota_SP[:, table.expert_of_slot_P < 0].sum() == 0
    best = smallest_largest_load(table, count_SE.sum(0))
    largest = gpu_loads(table, quota_SP).max()
    tolerance = 1e-6 if method == "lp" else 0.002 * best + 1e-6
    assert np.floor(best + 1e-6) <= largest <= np.ceil((best + tolerance) * (1 + slack))
    for source in range(table.num_gpus):
        row = split_batch(table, count_SE, method=method, slack=slack, source=source)
        np.testing.assert_array_equal(row, quota_SP[source])


@examples(80)
@given(batches())
def test_weights_split_each_rank_alone(batch):
    table, count_SE = batch
    quota_SP = np.stack([split_by_weight(table, count_E, source) for source, count_E in enumerate(count_SE)])
    np.testing.assert_array_equal(received(table, quota_SP), count_SE)
    exact_SP = table.weight_P * count_SE[:, np.maximum(table.expert_of_slot_P, 0)]
    assert (np.abs(quota_SP - exact_SP) < 1 + 1e-9).all(), "a slot is off by less than a token"


@examples(80)
@given(batches(), st.integers(1, 6), st.integers(0, 2**32))
def test_assign_uses_up_the_quota_exactly(batch, num_choices, seed):
    table, count_SE = batch
    rng = np.random.default_rng(seed)
    source = int(rng.integers(table.num_gpus))
    experts = np.repeat(np.arange(table.num_experts), count_SE[source])
    padded = np.append(experts, np.full(-len(experts) % num_choices, -1))
    expert_idx_TK = rng.permutation(padded).reshape(-1, num_choices)
    for quota_P in (split_batch(table, count_SE, source=source), split_by_weight(table, count_SE[source], source)):
        slot_idx_TK = assign(table, expert_idx_TK, quota_P, source)
        chosen = slot_idx_TK[expert_idx_TK >= 0]
        np.testing.assert_array_equal(table.expert_of_slot_P[chosen], expert_idx_TK[expert_idx_TK >= 0])
        assert (slot_idx_TK[expert_idx_TK < 0] == -1).all()
        np.testing.assert_array_equal(np.bincount(chosen, minlength=table.num_slots), quota_P)


def test_local_copies_come_first_then_the_node():
    # Expert 0 is on every GPU, expert 1 on one GPU of each node; two nodes of two GPUs.
    table = ReplicaTable.of_layer(Placement(np.array([[0, 1, 0, 2, 0, 1, 0, 3]]), num_gpus=4, num_nodes=2), 0)
    count_SE = np.array([[10, 4, 0, 0], [10, 4, 8, 0], [10, 4, 0, 0], [10, 4, 0, 8]])
    quota_SP = split_batch(table, count_SE, slack=0.0)
    assert gpu_loads(table, quota_SP).tolist() == [18, 18, 18, 18]
    own = [quota_SP[gpu, 2 * gpu] for gpu in range(4)]
    assert own == [10, 10, 10, 10], "expert 0 never leaves its GPU"
    assert quota_SP[:, 1].tolist() == [4, 4, 0, 0] and quota_SP[:, 5].tolist() == [0, 0, 4, 4]


def test_a_token_prefers_nodes_it_visits_anyway():
    # Expert 0 only on node 1; expert 1 on nodes 1 and 2: the token that needs both goes to node 1 alone.
    table = ReplicaTable.of_layer(Placement(np.array([[2, 3, 0, 1, 1, 4]]), num_gpus=3, num_nodes=3), 0)
    quota_P = np.array([0, 0, 1, 1, 1, 0])
    slot_idx_TK = assign(table, np.array([[0, 1], [1, -1]]), quota_P, source=0)
    assert slot_idx_TK.tolist() == [[2, 3], [4, -1]]


def test_single_tokens_of_many_ranks_spread_over_the_replicas():
    """With one token per rank, choosing by the token's index would send all of them to the same slot."""
    table = ReplicaTable.of_layer(Placement(np.array([[0, 1] * 8]), num_gpus=8), 0)
    count_E = np.array([1, 0])
    slots = [int(np.argmax(split_by_weight(table, count_E, source))) for source in range(8)]
    assert len(set(slots)) == 8


def test_masked_gpus_take_nothing_that_others_can():
    placement = Placement(np.array([[0, 1, 0, 2, 0, 3]]), num_gpus=3)
    table = ReplicaTable.of_layer(placement, 0, gpu_speed=np.array([1.0, 0.0, 2.0]))
    count_SE = np.full((3, 4), 6)
    count_SE[:, 2] = 0
    load = gpu_loads(table, split_batch(table, count_SE, slack=0.0))
    assert load[1] == 0 and load.sum() == count_SE.sum() and load[2] >= load[0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"count_SE": np.ones((2, 3), dtype=int)}, r"count_SE has shape \(2, 3\); the placement needs \(2, 2\)"),
        ({"count_SE": np.ones((2, 2))}, "count_SE has dtype float64"),
        ({"count_SE": np.array([[1, 2], [3, -4]])}, r"count_SE\[1, 1\] = -4"),
        ({"method": "magic"}, "method='magic': must be one of water_filling, lp"),
        ({"slack": -1.0}, "slack=-1.0"),
        ({"source": 2}, "source=2: there are ranks 0 to 1"),
    ],
)
def test_bad_input_to_the_split_is_named(change, message):
    table = ReplicaTable.of_layer(Placement(np.array([[0, 1, 0, 1]]), num_gpus=2), 0)
    arguments = {"count_SE": np.ones((2, 2), dtype=int), **change}
    with pytest.raises(ValueError, match=message):
        split_batch(table, **arguments)


def test_bad_input_to_assign_is_named():
    table = ReplicaTable.of_layer(Placement(np.array([[0, 1, 0, 1]]), num_gpus=2), 0)
    quota_P = np.array([1, 0, 0, 0])
    with pytest.raises(ValueError, match="expert 0 has more choices than its slots have quota"):
        assign(table, np.array([[0], [0]]), quota_P, 0)
    with pytest.raises(ValueError, match="expert_idx_TK holds 5; the placement has experts 0 to 1"):
        assign(table, np.array([[5]]), quota_P, 0)
    with pytest.raises(ValueError, match=r"gpu_speed=\[0 0\]"):
        ReplicaTable.of_layer(Placement(np.array([[0, 1, 0, 1]]), num_gpus=2), 0, gpu_speed=np.array([0, 0]))
