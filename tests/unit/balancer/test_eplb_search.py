"""Even plans beside every planner by EPLB's policy: sums in fp32 and in fp64, equal loads in any order."""

import itertools

import numpy as np
import pytest
from eprt.balancer import plan
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.balancer.cases import examples, largest_time, loads, shapes
from tests.unit.balancer.eplb_oracle import eplb_layer, largest_load

ROUNDING = 2e-7  # where two loads per copy are one number in fp32, their order is anyone's


def level_groups(load_LE: np.ndarray, num_groups: int) -> np.ndarray:
    """The same load with one expert of each group raised, so that all groups have the same load."""
    load_LKE = load_LE.reshape(len(load_LE), num_groups, -1).copy()
    load_LK = load_LKE.sum(2)
    load_LKE[:, :, -1] += load_LK.max(1, keepdims=True) - load_LK
    return load_LKE.reshape(load_LE.shape)


def shape_of(arguments: dict) -> tuple[int, ...]:
    return tuple(arguments[name] for name in ("num_slots", "num_groups", "num_nodes", "num_gpus"))


def check_never_worse(load_LE, arguments, orders: list[np.random.Generator | None], shares: str = "even") -> None:
    placement = plan(load_LE, **arguments, shares=shares)
    for load_E, largest in zip(load_LE, largest_time(placement, load_LE, arguments), strict=True):
        for number, rng in itertools.product((np.float32, np.float64), orders):
            theirs = eplb_layer(load_E, *shape_of(arguments), number, rng)
            bound = largest_load(theirs, load_E, arguments["num_gpus"]) * (1 + ROUNDING)
            assert largest <= bound, f"{largest} > {bound} in {number.__name__}: {arguments}, {load_E.tolist()}"


@examples(150)
@given(st.data())
def test_no_planner_by_the_policy_is_better(data):
    num_experts, arguments = data.draw(shapes())
    load_LE = data.draw(loads(num_experts))
    if data.draw(st.booleans()):
        load_LE = level_groups(load_LE, arguments["num_groups"])
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    check_never_worse(load_LE, arguments, [None, rng, rng])


CLUSTERS = [(288, 8, 1, 8), (288, 144, 18, 1), (320, 32, 4, 8), (320, 16, 2, 8), (512, 64, 8, 8)]


@pytest.mark.parametrize("cluster", CLUSTERS, ids=str)
def test_no_planner_is_better_for_deepseek_v3(cluster):
    """Few tokens: many experts and groups have the same load. The last layer's groups all have."""
    rng = np.random.default_rng(cluster)
    load_LE = rng.poisson([[0.7], [3], [30]], (3, 256)).astype(float) * rng.permutation(256)
    load_LE[2] = level_groups(load_LE[2:], 8)
    arguments = dict(zip(("num_slots", "num_gpus", "num_nodes", "num_groups"), cluster))
    check_never_worse(load_LE, arguments, [None, rng, rng])


def test_the_order_of_equal_groups_is_not_left_to_chance():
    """Two groups have all their load in one expert, two in two: which of them share a node decides."""
    load_E = np.array([10, 0, 10, 0, 1, 9, 1, 9], dtype=float)
    arguments = {"num_slots": 12, "num_gpus": 4, "num_nodes": 2, "num_groups": 4}
    orders = [np.random.default_rng(seed) for seed in range(20)]
    peaks = {largest_load(eplb_layer(load_E, *shape_of(arguments), rng=rng), load_E, 4) for rng in orders}
    assert len(peaks) > 1, "the order matters"
    check_never_worse(load_E[None], arguments, orders)


def test_precision_is_not_left_to_chance():
    """An even plan of 144 GPUs that fp64 finds and fp32 does not, and the other way round, is not missed."""
    rng = np.random.default_rng(0)
    by_rank_E = np.arange(1, 257) ** -1.0
    load_LE = np.stack([rng.permutation(by_rank_E) for _ in range(6)])
    arguments = {"num_slots": 288, "num_gpus": 144, "num_nodes": 18, "num_groups": 1}
    shape = shape_of(arguments)
    in_32, in_64 = (
        [largest_load(eplb_layer(load_E, *shape, number), load_E, 144) for load_E in load_LE]
        for number in (np.float32, np.float64)
    )
    assert not np.allclose(in_32, in_64, rtol=1e-6), "rounding decides"
    check_never_worse(load_LE, arguments, [None])
