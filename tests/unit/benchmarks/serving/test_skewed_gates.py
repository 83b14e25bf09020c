"""Skewed gates choose as wanted, and the plan for them evens out the ranks."""

import numpy as np
import pytest
import torch

from benchmarks.serving.generation import by_expert
from benchmarks.serving.skewed_gates import max_over_mean, rebalance, skew_gates
from eprt import EPGroup, EPMoE
from eprt.config import MoEConfig
from eprt.ep.exchange import Exchange
from eprt.ep.placement.slot_map import SlotMap
from tests.fake_gpu import Group

EXPERTS, WIDTH, INNER = 16, 32, 16


def layer(seed: int, group: EPGroup | None = None, num_redundant: int = 0) -> EPMoE:
    generator = torch.Generator().manual_seed(seed)
    config = MoEConfig(WIDTH, INNER, EXPERTS, 4, scoring="sigmoid", n_group=4, topk_group=2, dtype=torch.float32)
    ep = None if group is None else Exchange({"normal": None})  # type: ignore[dict-item]
    group = group or EPGroup.single()
    moe = EPMoE(config, group, slot_map=SlotMap.contiguous(EXPERTS, group.size, num_redundant), ep=ep).eval()
    moe.load_gate(torch.randn(EXPERTS, WIDTH, generator=generator) / WIDTH**0.5, torch.zeros(EXPERTS))
    for slot, expert in enumerate(moe.expert_of_slot):
        if expert >= 0:
            shapes = (INNER, WIDTH), (INNER, WIDTH), (WIDTH, INNER)
            moe.load_expert(slot, *(torch.randn(shape, generator=generator) for shape in shapes))
    return moe


@pytest.mark.parametrize("skew", [1.5, 2.0])
def test_the_busiest_expert_gets_so_many_times_the_mean(skew):
    layers = [layer(0), layer(1)]
    load_LE = skew_gates(layers, skew)
    assert load_LE.sum(axis=1).tolist() == [4096 * 4] * 2
    assert load_LE.max(axis=1) / load_LE.mean(axis=1) == pytest.approx([skew] * 2, rel=0.02)
    assert max_over_mean(load_LE) == pytest.approx(skew, rel=0.02)
    assert load_LE.argmax(axis=1)[0] != load_LE.argmax(axis=1)[1], "every layer has its own popular experts"
    moe, x_TH = layers[0], torch.randn(512, WIDTH)
    moe(x_TH)
    assert by_expert(moe, np.array(moe.expert_load())).argmax() == load_LE[0].argmax()


def test_every_slot_is_filled():
    group = Group(1, 2)
    moe = layer(0, group, num_redundant=4)
    assert -1 in moe.weight_buffers(), "a slot for a replica"
    load_LE = skew_gates([moe], 2.0)
    rebalance([moe], group, load_LE)
    experts = moe.slot_map.expert_of_slot_S.tolist()
    assert set(experts) == set(range(EXPERTS)) and experts.count(load_LE[0].argmax()) > 1
    assert sorted(moe.weight_buffers()) == list(range(10)) and moe.expert_of_slot == experts[10:]
    assert all((part[buffer] == part[buffer]).all() for part in moe.pool.parts for buffer in moe.weight_buffers())
