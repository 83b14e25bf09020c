"""What test_masked.py runs on every rank: EPMoE outside of a server, of whose ranks some are killed in its calls."""

import os
import re
import signal
from typing import Any

import numpy as np
import pytest
import torch

from eprt import EPGroup
from eprt.config import MoEConfig
from eprt.ep.errors import EPError
from eprt.ep.placement.slot_map import SlotMap
from eprt.layers.moe import EPMoE

NUM_EXPERTS = 8
CONFIG = MoEConfig(
    hidden_size=32,
    intermediate_size=16,
    num_experts=NUM_EXPERTS,
    top_k=3,
    num_max_tokens_per_rank=8,
    dtype=torch.float32,
)


def make_layer(group: EPGroup, row: list[int], **options: Any) -> EPMoE:
    moe = EPMoE(CONFIG, group, slot_map=SlotMap.from_row(np.array(row), NUM_EXPERTS), **options)
    generator = torch.Generator().manual_seed(0)
    moe.load_gate(torch.randn(NUM_EXPERTS, 32, generator=generator))
    matrices = torch.randn(NUM_EXPERTS, 3, 16, 32, generator=generator) / 6
    for slot, expert in enumerate(moe.expert_of_slot):
        gate, up, down = matrices[expert]
        moe.load_expert(slot, gate, up, down.T.contiguous())
    return moe.eval()


def die_in(moe: EPMoE, call: str, num_good: int) -> None:
    """This process kills itself instead of the call, after so many good ones."""
    backend = moe.ep["normal"]
    original = getattr(backend, call)
    left = num_good

    def count(*arguments, **options):
        nonlocal left
        left -= 1
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*arguments, **options)

    setattr(backend, call, count)


def masked(group: EPGroup, deaths: dict[str, list]) -> None:
    """deaths: rank -> in which call it dies, after how many. Every expert is on every rank; two layers take turns."""
    alone = make_layer(EPGroup.single(), list(range(NUM_EXPERTS)))
    layers = [make_layer(group, list(range(NUM_EXPERTS)) * group.size, mask_lost_ranks=True) for _ in range(2)]
    if str(group.rank) in deaths:
        die_in(layers[0], *deaths[str(group.rank)])
    for step in range(12):
        # Up to three rounds of eight tokens, and none now and then.
        x = torch.randn((step * 7 + 5 * group.rank) % 23, 32, generator=torch.Generator().manual_seed(step))
        for moe in layers:
            torch.testing.assert_close(moe(x), alone(x), rtol=0, atol=0)
    assert [rank for rank in range(group.size) if str(rank) not in deaths] == list(group.view.ranks)
    assert all(count > 0 for count in layers[0].expert_load())
    print("MASKED", flush=True)
    os._exit(0)  # closing is collective


def without_replicas(group: EPGroup) -> None:
    moe = make_layer(group, list(range(NUM_EXPERTS)), mask_lost_ranks=True)
    x = torch.randn(5, 32)
    moe(x)
    if group.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    for _ in range(2):
        with pytest.raises(EPError, match=re.escape("experts 4, 5, 6, 7 had no replica outside of rank 1")):
            moe(x)
    print("REFUSED", flush=True)
    os._exit(0)
