"""EPMoE over ranks against transformers' blocks, whose weights, inputs and outputs save_block() wrote.

The ranks do not import transformers: that would take longer than all cases together.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from eprt.balancer import Placement

from eprt import EPGroup
from eprt.compat.hf import MoEBlock, build_moe, describe_moe
from eprt.ep.placement.slot_map import SlotMap
from tests import tiny

FAMILIES = tiny.FAMILIES
NUM_TOKENS = 120


@torch.no_grad()
def save_block(root: Path, family: str) -> None:
    module = tiny.make_moe_block(family)
    block = describe_moe(module)
    x_TH = torch.randn(NUM_TOKENS, 64)
    experts = [block.expert(e) for e in range(block.num_experts)]
    torch.save((replace(block, expert=None), experts, x_TH, module(x_TH[None])[0]), root / f"{family}.block")


def load_block(
    root: str, family: str, dtype: torch.dtype = torch.float32
) -> tuple[MoEBlock, torch.Tensor, torch.Tensor]:
    """(block, x [T, H], transformers' y [T, H])."""
    block, experts, x_TH, y_TH = torch.load(Path(root) / f"{family}.block", weights_only=False)
    return replace(block, expert=lambda e: tuple(w.to(dtype) for w in experts[e])), x_TH, y_TH


def rows_of(group: EPGroup, num_tokens: int) -> slice:
    """This rank's tokens: another part of them on every rank."""
    start = 17 * group.rank
    assert start + num_tokens <= NUM_TOKENS + 60
    return slice(start, start + num_tokens)


def every_family(group: EPGroup, root: str, exact: bool):
    """Another number of tokens on every rank, then none on one; no number of ranks needs to divide the experts."""
    for family in FAMILIES:
        block, x, want = load_block(root, family)
        moe, alone = build_moe(block, group), build_moe(block, EPGroup.single())
        for empty_rank in (None, group.size - 1):
            rows = rows_of(group, 0 if group.rank == empty_rank else 5 + 2 * group.rank)
            y = moe(x[rows])
            torch.testing.assert_close(y, want[rows], rtol=1e-5, atol=1e-4)
            if exact:
                assert torch.equal(y, alone(x[rows])), family
        routed = [sum(part) for part in zip(*group.allgather([sum(moe.expert_load()), sum(alone.expert_load())]))]
        assert routed[0] > 0 and (not exact or routed[0] == routed[1])
        moe.close()


def rounds(group: EPGroup, root: str, exact: bool):
    """Ranks with 0, 50 and 3 tokens, at most 7 in a dispatch: all take part in eight rounds."""
    block, x, want = load_block(root, "v3")
    moe = build_moe(block, group, num_max_tokens_per_rank=7)
    alone = build_moe(block, EPGroup.single())
    for shift in range(3):
        rows = slice(shift, shift + (0, 50, 3)[(group.rank + shift) % 3])
        y = moe(x[rows])
        torch.testing.assert_close(y, want[rows], rtol=1e-5, atol=1e-5)
        assert not exact or torch.equal(y, alone(x[rows]))
    moe.close()


def replicas(group: EPGroup, root: str, exact: bool):
    """Hot experts with copies on every rank change nothing but the load."""
    block, x, _ = load_block(root, "v3")
    per_rank = -(-16 // group.size) + 2
    slots = [[0, 3] + [e for e in range(16) if e % group.size == rank] for rank in range(group.size)]
    slots = [part + [-1] * (per_rank - len(part)) for part in slots]
    placement = Placement(np.array(slots).reshape(1, -1), num_gpus=group.size)
    moe = build_moe(block, group, slot_map=SlotMap.from_placement(placement, 0))
    alone = build_moe(block, EPGroup.single())
    y = moe(x)
    torch.testing.assert_close(y, alone(x), rtol=1e-5, atol=1e-5)
    assert not exact or torch.equal(y, alone(x))
    assert sum(load[0] > 0 for load in group.allgather(moe.expert_load())) == group.size
    moe.close()


def formats(group: EPGroup, root: str, exact: bool):
    """bf16, quantised weights and an fp8 wire give on many ranks what they give on one, to the bit."""
    block, x, want = load_block(root, "v3", torch.bfloat16)
    x = x.bfloat16()
    for weight_format, payload, limit in (
        ("same", "same", 0.02),
        ("int8", "same", 0.03),
        ("fp8", "fp8", 0.1),
        ("same", "fp8", 0.1),
    ):
        options = {"weight_format": weight_format, "payload": payload}
        moe, alone = build_moe(block, group, **options), build_moe(block, EPGroup.single(), **options)
        y = moe(x)
        # Not in bf16, whose rounding of the input may change a token's experts: the median token is the measure.
        error = ((y.float() - want).pow(2).mean(-1) / want.pow(2).mean(-1)).sqrt().median()
        assert 1e-4 < error < limit, (options, error)
        assert not exact or torch.equal(y, alone(x)), options
        moe.close()


def modes(group: EPGroup, root: str, exact: bool):
    """Both modes, quantised payload included, give the same."""
    block, x, _ = load_block(root, "v3")
    for payload in ("same", "fp8"):
        normal = build_moe(block, group, payload=payload)
        low_latency = build_moe(block, group, payload=payload, mode="low_latency", num_max_tokens_per_rank=16)
        rows = rows_of(group, 7 * (group.rank % 3))
        assert torch.equal(normal(x[rows]), low_latency(x[rows]))
        normal.close()
        low_latency.close()


def states(group: EPGroup, root: str, exact: bool):
    """Each rank's state has what it holds; all ranks' together load on any rank, on one alone too."""
    block, x, _ = load_block(root, "glm4")
    moe, alone = build_moe(block, group), build_moe(block, EPGroup.single())
    own = moe.state_dict()
    held = {int(name.split(".")[1]) for name in own if name.startswith("experts.")}
    assert held == {expert for expert in moe.expert_of_slot if expert >= 0}
    merged = {}
    for state in group.allgather({name: tensor.clone() for name, tensor in own.items()}):
        merged |= state
    assert merged.keys() == alone.state_dict().keys()
    y = moe(x)
    for parameter in (*moe.parameters(), *alone.parameters()):
        parameter.zero_()
    moe.load_state_dict(merged)
    alone.load_state_dict(merged)
    assert torch.equal(moe(x), y) and (not exact or torch.equal(alone(x), y))
    moe.close()


def moves(group: EPGroup, root: str, exact: bool):
    """To another dtype and back, on all ranks alike."""
    block, x, _ = load_block(root, "v3")
    moe = build_moe(block, group)
    y = moe(x)
    moe.bfloat16()
    error = ((moe(x.bfloat16()).float() - y).norm(dim=-1) / y.norm(dim=-1)).median()
    assert 1e-4 < error < 0.02, error
    moe.float()
    assert moe.config.dtype == torch.float32 and {p.dtype for p in moe.parameters()} == {torch.float32}
    moe.close()


def compiled(group: EPGroup, root: str, exact: bool):
    """A program without graph breaks on every rank, with other numbers of tokens on each, also none."""
    block, x, _ = load_block(root, "qwen3")
    moe = build_moe(block, group)
    program = torch.compile(
        lambda x_TH: torch.relu(moe(x_TH)) + x_TH, fullgraph=True, backend="aot_eager", dynamic=True
    )
    for num_tokens in (5 + group.rank, 0 if group.rank else 3, 30):
        rows = rows_of(group, num_tokens)
        assert torch.equal(program(x[rows]), torch.relu(moe(x[rows])) + x[rows])
    moe.close()


@torch.no_grad()
def all_cases(group: EPGroup, root: str, exact: bool = True):
    """exact: one node. Across nodes partial sums are added in another order, and cross in the wire's dtype."""
    for case in (every_family, rounds, replicas, formats, modes, states, moves, compiled):
        case(group, root, exact)
