"""What every rank does in test_moe_ranks.py: EPMoE over ranks against the transformers block it was made from."""

import numpy as np
import torch
from eprt.balancer import Placement

from eprt import EPGroup, EPMoE
from eprt.compat.hf import convert_moe, replace_moe_blocks
from eprt.ep.placement import SlotMap
from tests import tiny


def tokens_of(group: EPGroup, num_tokens: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * seed + group.rank)
    return torch.randn(num_tokens, 64, generator=generator).to(dtype)


def every_family(group: EPGroup):
    """Different tokens on every rank, none on the last but one; no number of ranks needs to divide the experts."""
    for family in ("v2", "v2_groups", "v3", "qwen3", "mixtral"):
        block = tiny.make_moe_block(family)
        moe = EPMoE.from_hf(block, group)
        alone = EPMoE.from_hf(block, EPGroup.single())
        for seed, skip in enumerate((0, 1)):
            x = tokens_of(group, 0 if skip and group.rank == group.size - 2 else 5 + 9 * group.rank, seed)
            y = moe(x)
            torch.testing.assert_close(y, block(x[None])[0], rtol=1e-5, atol=1e-4)
            assert torch.equal(y, alone(x)), family
        counted = [sum(part) for part in zip(*group.allgather([sum(moe.expert_load()), sum(alone.expert_load())]))]
        assert counted[0] == counted[1] > 0
        moe.close()


def rounds(group: EPGroup):
    """Ranks with 0, 50 and 3 tokens, at most 7 in a dispatch: all take part in eight rounds."""
    block = tiny.make_moe_block("v3")
    moe = EPMoE.from_hf(block, group, num_max_tokens_per_rank=7)
    alone = EPMoE.from_hf(block, EPGroup.single())
    for seed, shift in enumerate((0, 1, 2)):
        x = tokens_of(group, (0, 50, 3)[(group.rank + shift) % 3], seed)
        assert torch.equal(moe(x), alone(x))
    moe.close()


def replicas(group: EPGroup):
    """Hot experts with copies on every rank change nothing but the load."""
    block = tiny.make_moe_block("v3")
    per_rank = -(-16 // group.size) + 2
    slots = [[0, 3] + [e for e in range(16) if e % group.size == rank] for rank in range(group.size)]
    slots = [part + [-1] * (per_rank - len(part)) for part in slots]
    placement = Placement(np.array(slots).reshape(1, -1), num_gpus=group.size)
    moe = convert_moe(block, group, slot_map=SlotMap.of_layer(placement, 0))
    alone = EPMoE.from_hf(block, EPGroup.single())
    x = tokens_of(group, 40)
    assert torch.equal(moe(x), alone(x))
    if group.size > 1:
        loads = group.allgather(moe.expert_load())
        assert sum(load[0] > 0 for load in loads) == group.size, loads
    moe.close()


def formats(group: EPGroup):
    """bf16, quantised weights and an fp8 wire give on many ranks what they give on one, to the bit."""
    for weight_format, payload in (("same", "same"), ("int8", "same"), ("fp8", "fp8"), ("same", "fp8")):
        block = tiny.make_moe_block("v3", dtype=torch.bfloat16)
        options = {"weight_format": weight_format, "payload": payload}
        moe = EPMoE.from_hf(block, group, **options)
        alone = EPMoE.from_hf(block, EPGroup.single(), **options)
        x = tokens_of(group, 11, dtype=torch.bfloat16)
        y = moe(x)
        assert torch.equal(y, alone(x)), options
        want = block.float()(x.float()[None])[0]
        error = ((y.float() - want).pow(2).mean() / want.pow(2).mean()).sqrt()
        assert 1e-4 < error < (0.12 if "fp8" in options.values() else 0.03), (options, error)
        moe.close()


def patched_models(group: EPGroup):
    for family in ("v2", "v3", "qwen3", "mixtral"):
        model = tiny.make_family(family)
        (prompt,) = tiny.prompts(lengths=(9 + group.rank,), seed=group.rank)
        want = tiny.golden_logits(model, prompt)
        layers = replace_moe_blocks(model, group)
        assert (tiny.golden_logits(model, prompt) - want).abs().max() < 1e-4
        layers[0].close()


def all_cases(group: EPGroup):
    with torch.no_grad():
        for case in (every_family, rounds, replicas, formats, patched_models):
            case(group)


def near_enough(group: EPGroup):
    """Across nodes partial sums are added in another order, and cross in the wire's dtype."""
    with torch.no_grad():
        for family in ("v2", "v3", "qwen3", "mixtral"):
            block = tiny.make_moe_block(family)
            moe = EPMoE.from_hf(block, group)
            x = tokens_of(group, 20 * (group.rank % 2))
            torch.testing.assert_close(moe(x), block(x[None])[0], rtol=1e-5, atol=1e-5)
            moe.close()
        rounds_near = EPMoE.from_hf(tiny.make_moe_block("v3"), group, num_max_tokens_per_rank=7)
        x = tokens_of(group, 30 * group.rank)
        torch.testing.assert_close(rounds_near(x), tiny.make_moe_block("v3")(x[None])[0], rtol=1e-5, atol=1e-5)
        rounds_near.close()
