"""SiLU-and-multiply of a dense SwiGLU block, optionally quantised in the same kernel.

For routed experts it is part of the matrix product (grouped_gemm.py).
"""

import triton
import triton.language as tl
from torch import Tensor

from eprt.ops.cuda.quantize import launch, store_quantized

_BLOCK = 1024


@triton.jit
def silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit
def _silu_mul(out, x, row_stride, size, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    gate = tl.load(x + row * row_stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + row * row_stride + size + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * size + column, (silu(gate) * up).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _silu_mul_quantize(
    data, scale, x, row_stride, size, num_groups, scale_stride, group_stride, GROUPS: tl.constexpr, SIZE: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    column = group[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    gate = tl.load(x + row * row_stride + column, mask=column < size, other=0.0).to(tl.float32)
    up = tl.load(x + row * row_stride + size + column, mask=column < size, other=0.0).to(tl.float32)
    value = silu(gate) * up
    store_quantized(data, scale, value, row, group, column, size, num_groups, scale_stride, group_stride)


def silu_mul_quantize(x_TI2: Tensor, padded_to: int = 1) -> tuple[Tensor, Tensor]:
    """quantize_rows(silu_mul(x), padded_to) without rounding in between."""
    return launch(_silu_mul_quantize, x_TI2, x_TI2.shape[1] // 2, padded_to)


def silu_mul(x_TI2: Tensor) -> Tensor:
    rows, size = x_TI2.shape[0], x_TI2.shape[1] // 2
    out_TI = x_TI2.new_empty(rows, size)
    if rows:
        _silu_mul[(rows, triton.cdiv(size, _BLOCK))](out_TI, x_TI2, x_TI2.stride(0), size, BLOCK=_BLOCK)
    return out_TI
