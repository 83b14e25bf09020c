"""Activations in fp8: e4m3 with one fp32 scale per row and 128 columns; scale = max / 448, value = data * scale."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from eprt.ops.weight import BLOCK

_GROUPS = 8
# Keeps a group of zeros from dividing by zero.
SMALLEST = tl.constexpr(1e-12)


@triton.jit
def store_quantized(data, scale, value, row, group, column, size, num_groups, scale_stride, group_stride):
    """Stores a row as e4m3 with a scale per group. value: fp32 [groups, columns of a group]."""
    factor = tl.maximum(tl.max(tl.abs(value), axis=1) / 448.0, SMALLEST)
    tl.store(scale + row * scale_stride + group * group_stride, factor, mask=group < num_groups)
    tl.store(data + row * size + column, (value / factor[:, None]).to(data.dtype.element_ty), mask=column < size)


@triton.jit(do_not_specialize=["group_stride", "scale_stride"])
def _quantize_rows(
    data, scale, x, row_stride, size, num_groups, scale_stride, group_stride, GROUPS: tl.constexpr, SIZE: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    column = group[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    value = tl.load(x + row * row_stride + column, mask=column < size, other=0.0).to(tl.float32)
    store_quantized(data, scale, value, row, group, column, size, num_groups, scale_stride, group_stride)


def new_quantized(x: Tensor, size: int, padded_to: int) -> tuple[Tensor, Tensor]:
    """Uninitialised memory for the result of quantize_rows, for as many rows as x has, of `size` values each."""
    rows, groups, padded = x.shape[0], triton.cdiv(size, BLOCK), triton.cdiv(x.shape[0], padded_to) * padded_to
    data_MK = torch.empty(padded, size, dtype=torch.float8_e4m3fn, device=x.device)
    if padded_to > 1:
        return data_MK, torch.empty(groups, padded, dtype=torch.float32, device=x.device).T
    return data_MK, torch.empty(rows, groups, dtype=torch.float32, device=x.device)


def launch(kernel: Any, x: Tensor, size: int, padded_to: int, *given: float | None) -> tuple[Tensor, Tensor]:
    """The result of quantize_rows, for the rows of `size` values that the kernel makes of x's rows.

    given: arguments of the kernel that follow x."""
    rows, groups = x.shape[0], triton.cdiv(size, BLOCK)
    data_MK, scale_MG = new_quantized(x, size, padded_to)
    if rows:
        kernel[(rows, triton.cdiv(groups, _GROUPS))](
            data_MK, scale_MG, x, *given, x.stride(0), size, groups, *scale_MG.stride(), GROUPS=_GROUPS, SIZE=BLOCK
        )
    return data_MK, scale_MG


def quantize_rows(x_MK: Tensor, padded_to: int = 1) -> tuple[Tensor, Tensor]:
    """(e4m3 [M, K], fp32 [M, ceil(K / 128)]) of float32 or bfloat16 rows.

    padded_to: above 1, the layout that cuBLAS takes: M is rounded up to a multiple of it, by undefined rows, and the
        scales are stored column by column.
    """
    return launch(_quantize_rows, x_MK, x_MK.shape[1], padded_to)
