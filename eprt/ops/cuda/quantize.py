"""Activations as fp8: e4m3 with one fp32 scale per row and 128 columns, scale = max / 448, value = data * scale."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from eprt.ops.weight import BLOCK

_GROUPS = 8
# So that a group of zeros divides by something.
SMALLEST = tl.constexpr(1e-12)


@triton.jit
def _quantize_rows(data, scale, x, row_stride, size, num_groups, GROUPS: tl.constexpr, SIZE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    column = group[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    value = tl.load(x + row * row_stride + column, mask=column < size, other=0.0).to(tl.float32)
    factor = tl.maximum(tl.max(tl.abs(value), axis=1) / 448.0, SMALLEST)
    tl.store(scale + row * num_groups + group, factor, mask=group < num_groups)
    tl.store(data + row * size + column, (value / factor[:, None]).to(data.dtype.element_ty), mask=column < size)


def quantize_rows(x_MK: Tensor) -> tuple[Tensor, Tensor]:
    """(e4m3 [M, K], fp32 [M, ceil(K / 128)]) of float32 or bfloat16 rows."""
    rows, size = x_MK.shape
    groups = triton.cdiv(size, BLOCK)
    data_MK = torch.empty(rows, size, dtype=torch.float8_e4m3fn, device=x_MK.device)
    scale_MG = torch.empty(rows, groups, dtype=torch.float32, device=x_MK.device)
    if rows:
        grid = (rows, triton.cdiv(groups, _GROUPS))
        _quantize_rows[grid](data_MK, scale_MG, x_MK, x_MK.stride(0), size, groups, GROUPS=_GROUPS, SIZE=BLOCK)
    return data_MK, scale_MG
