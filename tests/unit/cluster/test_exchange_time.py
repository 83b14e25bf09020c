"""The planner's exchange times against those that DeepEP's authors published."""

from dataclasses import replace

import pytest

from eprt.cluster.cluster_layout import ClusterLayout
from eprt.cluster.crossings import ExpertChoice, experts_elsewhere
from eprt.cluster.exchange_time import _COMBINE, _DISPATCH, card_leg, low_latency, normal
from eprt.cluster.model_cost import ModelCost
from tests.unit.cluster.cases import (
    LOW_LATENCY,
    LOW_LATENCY_CARDS_ONLY,
    LOW_LATENCY_OF_OTHERS,
    NORMAL,
    NORMAL_ONCE_PER_NODE,
    NORMAL_PER_EXPERT,
    OUTLIERS_ONCE_PER_NODE,
    deepseek_v3,
)

FREE = ExpertChoice(256, 8)
TOKENS = 128


def by_card(copies: float) -> tuple[float, float]:
    model = deepseek_v3()
    sizes = TOKENS * copies * model.dispatch_bytes, TOKENS * copies * model.combine_bytes
    return card_leg(_DISPATCH, 50).us(sizes[0]), card_leg(_COMBINE, 50).us(sizes[1])


def test_low_latency_between_nodes_is_as_published():
    """22 times, of which ten were fitted."""
    errors = []
    for size, published in LOW_LATENCY_CARDS_ONLY.items():
        errors += [ours / theirs - 1 for ours, theirs in zip(by_card(experts_elsewhere(FREE, size)), published)]
    for size, published in LOW_LATENCY.items():
        if size > 8:
            copies = experts_elsewhere(FREE, size // 8)
            errors += [ours / theirs - 1 for ours, theirs in zip(by_card(copies), published)]
    assert len(errors) == 22
    assert max(map(abs, errors)) < 0.091
    assert sum(map(abs, errors)) / len(errors) < 0.0365


def test_low_latency_inside_a_node_of_h800_is_as_published():
    (time,) = low_latency(ClusterLayout(1, gpu="h800"), deepseek_v3(), 8, TOKENS)
    copies = experts_elsewhere(FREE, 8) * TOKENS  # V1 sends a copy for each expert; ours one for each GPU
    legs = ClusterLayout(1, gpu="h800").speed
    model = deepseek_v3()
    assert legs.dispatch.us(copies * model.dispatch_bytes) == pytest.approx(LOW_LATENCY[8][0], rel=0.02)
    assert legs.combine.us(copies * model.combine_bytes) == pytest.approx(LOW_LATENCY[8][1], rel=0.02)
    assert time.way == "nvlink" and time.dispatch_us < LOW_LATENCY[8][0]


@pytest.mark.parametrize("size", NORMAL)
def test_normal_mode_between_nodes_is_as_published(size):
    model = deepseek_v3()
    model = model if size == 64 else with_free_choice(model)
    layout = ClusterLayout(size // 8, gpu="h800", nic_GBps=50)
    (once,) = [time for time in normal(layout, model, size, 4096) if time.way == "node"]
    for ours, theirs in zip((once.dispatch_us, once.combine_us), NORMAL[size]):
        assert ours == pytest.approx(theirs, rel=0.06)


def with_free_choice(model: ModelCost) -> ModelCost:
    assert model.config.moe is not None
    return replace(model, config=replace(model.config, moe=replace(model.config.moe, n_group=1, topk_group=1)))


@pytest.mark.parametrize("library", LOW_LATENCY_OF_OTHERS)
def test_low_latency_of_others_is_near(library):
    """None of these was fitted."""
    for size, published in LOW_LATENCY_OF_OTHERS[library].items():
        for ours, theirs in zip(by_card(experts_elsewhere(FREE, size // 8)), published):
            assert ours == pytest.approx(theirs, rel=0.11)


def normal_us(size: int, way: str) -> dict[str, float]:
    layout, model = ClusterLayout(size // 8, nic_GBps=50), with_free_choice(deepseek_v3())
    time = next(time for time in normal(layout, model, size, 4096) if time.way == way)
    return {"dispatch": time.dispatch_us, "combine": time.combine_us}


def test_normal_mode_of_others_is_near():
    for way, published in (("expert", NORMAL_PER_EXPERT), ("node", NORMAL_ONCE_PER_NODE)):
        for call, times in published.items():
            for size, theirs in times.items():
                assert normal_us(size, way)[call] == pytest.approx(theirs, rel=0.06)


def test_outliers_stay_outliers():
    """A change of the model that explains them should say so here."""
    for size, theirs in OUTLIERS_ONCE_PER_NODE["dispatch"].items():
        assert theirs / normal_us(size, "node")["dispatch"] > 1.5


def test_the_faster_way_comes_first_and_the_bound_is_named():
    model = with_free_choice(deepseek_v3())
    for nodes in (2, 4, 8, 32):
        times = low_latency(ClusterLayout(nodes), model, 8 * nodes, TOKENS)
        assert [time.both_us for time in times] == sorted(time.both_us for time in times)
        assert {time.way for time in times} == {"expert", "node"}
        assert all(time.bound == "NIC" for time in times)
    (fast, _) = low_latency(ClusterLayout(2, nic_GBps=5000), model, 16, TOKENS)
    assert fast.bound == "NVLink"
    gain = {
        nodes: low_latency(ClusterLayout(nodes), model, 8 * nodes, TOKENS) for nodes in (2, 32)
    }  # what one copy a node saves becomes less with the number of nodes
    ratio = {nodes: times[-1].both_us / times[0].both_us for nodes, times in gain.items()}
    assert ratio[2] > 2 and ratio[32] < 1.2


def test_a_faster_card_costs_less_but_its_start():
    assert card_leg(_DISPATCH, 100).us(1e6) < card_leg(_DISPATCH, 50).us(1e6)
    assert card_leg(_DISPATCH, 100).us(0) == _DISPATCH.start_us
