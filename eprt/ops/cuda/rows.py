"""Rows by slot: one program per slot places them, one per token and piece of a row sums them."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


@triton.jit
def _add_rows(out, x, y, z, size, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    x_at, y_at = tl.load(x + at, mask=inside, other=0.0), tl.load(y + at, mask=inside, other=0.0)
    total = y_at.to(tl.float32) + tl.load(z + at, mask=inside, other=0.0).to(tl.float32)
    total = x_at.to(tl.float32) + total.to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=inside)


def add_rows(x_TH: Tensor, y_TH: Tensor, z_TH: Tensor | None) -> Tensor:
    """As eprt.ops.rows.add_rows. All of one dtype and contiguous."""
    if z_TH is None:
        return x_TH + y_TH
    out_TH = torch.empty_like(x_TH)
    if size := x_TH.numel():
        _add_rows[(triton.cdiv(size, _BLOCK),)](out_TH, x_TH, y_TH, z_TH, size, BLOCK=_BLOCK)
    return out_TH


@triton.jit
def _place_rows(row_A, token_R, count_E, slot_A, size, NUM_SLOTS, K: tl.constexpr, BLOCK: tl.constexpr):
    own = tl.program_id(0)  # a slot; the last program has the masked entries
    at = tl.arange(0, BLOCK)
    earlier, mine = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32)
    for start in range(0, size, BLOCK):
        slot = _slot_of(slot_A, start + at, size, NUM_SLOTS)
        earlier += (slot < own).to(tl.int32)
        mine += (slot == own).to(tl.int32)
    count, first = tl.sum(mine, axis=0), tl.sum(earlier, axis=0)
    tl.store(count_E + own, count, mask=own < NUM_SLOTS)
    if count > 0:
        for start in range(0, size, BLOCK):
            is_own = _slot_of(slot_A, start + at, size, NUM_SLOTS) == own
            one = is_own.to(tl.int32)
            row = (first + tl.cumsum(one, axis=0) - 1).to(tl.int64)
            tl.store(row_A + start + at, tl.where(own < NUM_SLOTS, row, -1), mask=is_own)
            tl.store(token_R + row, ((start + at) // K).to(tl.int64), mask=is_own)
            first += tl.sum(one, axis=0)


@triton.jit
def _slot_of(slot_A, at, size, NUM_SLOTS):
    """NUM_SLOTS for masked entries, more past the last one."""
    slot = tl.load(slot_A + at, mask=at < size, other=0).to(tl.int32)
    slot = tl.where((slot < 0) | (slot >= NUM_SLOTS), NUM_SLOTS, slot)
    return tl.where(at < size, slot, NUM_SLOTS + 1)


def place_rows(slot_TK: Tensor, num_slots: int) -> tuple[Tensor, Tensor, Tensor]:
    size, top_k = slot_TK.numel(), slot_TK.shape[1]
    row_TK = torch.empty(slot_TK.shape, dtype=torch.int64, device=slot_TK.device)
    token_R, count_E = row_TK.new_empty(size), row_TK.new_empty(num_slots, dtype=torch.int32)
    block = 1024 if size <= 1024 else 4096
    _place_rows[(num_slots + 1,)](
        row_TK, token_R, count_E, slot_TK.contiguous(), size, num_slots, K=top_k, BLOCK=block, num_warps=8
    )
    return row_TK, token_R, count_E


@triton.jit
def _sum_rows(out, y, row_TK, weight_TK, size, K: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for k in tl.static_range(K):
        row = tl.load(row_TK + token * K + k)
        value = tl.load(y + row * size + column, mask=(column < size) & (row >= 0), other=0.0)
        total += value.to(tl.float32) * tl.load(weight_TK + token * K + k)
    tl.store(out + token * size + column, total.to(out.dtype.element_ty), mask=column < size)


def sum_rows(y_RH: Tensor, row_TK: Tensor, weight_TK: Tensor) -> Tensor:
    (tokens, top_k), size = row_TK.shape, y_RH.shape[1]
    out_TH = y_RH.new_empty(tokens, size)
    if tokens:
        grid = (tokens, triton.cdiv(size, _BLOCK))
        _sum_rows[grid](out_TH, y_RH, row_TK.contiguous(), weight_TK.contiguous(), size, K=top_k, BLOCK=_BLOCK)
    return out_TH
