"""rebalance_experts: EPLB's answers, shapes and types."""

import numpy as np
import pytest
from eprt.balancer import rebalance_experts
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.balancer.cases import examples, loads, shapes
from tests.unit.balancer.eplb_oracle import eplb_layer


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


def test_rebalance_experts_has_eplb_shapes():
    # The call of EPLB's README: 2 layers of 12 experts, 16 slots, 4 groups, 2 nodes, 8 GPUs.
    weight = np.array(
        [[90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86], [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27]]
    )
    phy2log, log2phy, logcnt = rebalance_experts(weight, 16, 4, 2, 8)
    assert phy2log.shape == (2, 16) and logcnt.shape == (2, 12) and log2phy.shape == (2, 12, logcnt.max())
    assert {a.dtype for a in (phy2log, log2phy, logcnt)} == {np.dtype(np.int64)}
    assert (logcnt.sum(1) == 16).all()
    # The same experts are doubled as in EPLB's published result.
    assert np.argwhere(logcnt == 2).tolist() == [[0, 1], [0, 4], [0, 5], [0, 10], [1, 1], [1, 5], [1, 6], [1, 8]]
    with pytest.raises(ValueError, match=r"weight\[layer 0, expert 1\] = 1e\+39: EPLB plans in fp32"):
        rebalance_experts(np.array([[1.0, 1e39]]), 2, 1, 1, 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((7, 1, 1, 4), "num_replicas=7 is not a positive multiple of num_gpus=4"),
        ((8, 1, 1, 0), "num_replicas=8 is not a positive multiple of num_gpus=0"),
        ((8, 4, 4, 2), "num_gpus=2 is not a positive multiple of num_nodes=4"),
        ((8, 3, 1, 4), "the number of experts=8 is not a positive multiple of num_groups=3"),
        ((4, 1, 1, 4), "num_replicas=4 counts all physical slots; it cannot hold 8 experts"),
    ],
)
def test_arguments_that_do_not_fit_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        rebalance_experts(np.ones((1, 8)), *arguments)


def test_groups_that_no_node_can_hold_whole_are_ignored():
    weight = np.random.default_rng(0).integers(0, 99, (2, 12))
    for got, want in zip(rebalance_experts(weight, 16, 3, 2, 8), rebalance_experts(weight, 16, 1, 1, 8)):
        np.testing.assert_array_equal(got, want)
