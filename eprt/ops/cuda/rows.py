"""Sums of rows: one program per token and piece of a row."""

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
