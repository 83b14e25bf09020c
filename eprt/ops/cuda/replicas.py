"""Slots of chosen experts: one program per expert finds the choices of it in the batch and numbers them in order."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from eprt.ops.replicas import GOLDEN, ONE

_BLOCK = 1024
_ONE, _GOLDEN = tl.constexpr(ONE), tl.constexpr(GOLDEN)


@triton.jit(do_not_specialize=["num_choices"])
def _choose_slots(chosen, expert_A, slot_LX, bound_LX, sent_L, num_choices, width, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    expert = tl.where(row == tl.num_programs(0) - 1, -1, row)
    slots, bounds = slot_LX + row.to(tl.int64) * width, bound_LX + row.to(tl.int64) * width
    number = tl.load(sent_L + row)
    for start in range(0, num_choices, BLOCK):
        at = start + tl.arange(0, BLOCK)
        mine = tl.load(expert_A + at, mask=at < num_choices, other=-2) == expert
        counted = tl.cumsum(mine.to(tl.int32), 0)
        phase = ((number + counted - 1) * _GOLDEN) & (_ONE - 1)
        replica = tl.zeros([BLOCK], tl.int32)
        to = bounds
        bound = tl.load(to)
        while bound < _ONE:
            replica += (phase >= bound).to(tl.int32)
            to += 1
            bound = tl.load(to)
        tl.store(chosen + at, tl.load(slots + replica, mask=mine, other=-1), mask=mine)
        number += tl.sum(mine.to(tl.int32), 0)
    tl.store(sent_L + row, number)


@triton.jit(do_not_specialize=["num_choices", "masked"])
def _only_slots(chosen, expert_A, slot_L, num_choices, masked, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    expert = tl.load(expert_A + at, mask=at < num_choices, other=0)
    slot = tl.load(slot_L + tl.where(expert < 0, masked, expert), mask=at < num_choices, other=0)
    tl.store(chosen + at, slot, mask=at < num_choices)


def choose_slots(expert_idx_TK: Tensor, slot_LX: Tensor, bound_LX: Tensor, sent_L: Tensor) -> Tensor:
    """As eprt.ops.replicas.choose_slots; nothing waits for the GPU. Experts that do not exist get undefined slots."""
    rows, width = slot_LX.shape
    expert_idx_TK = expert_idx_TK.contiguous()
    chosen_TK = torch.empty_like(expert_idx_TK)
    if not (num_choices := expert_idx_TK.numel()):
        return chosen_TK
    if width == 1:
        grid = (triton.cdiv(num_choices, _BLOCK),)
        _only_slots[grid](chosen_TK, expert_idx_TK, slot_LX, num_choices, rows - 1, BLOCK=_BLOCK)
    else:
        _choose_slots[(rows,)](chosen_TK, expert_idx_TK, slot_LX, bound_LX, sent_L, num_choices, width, BLOCK=_BLOCK)
    return chosen_TK
