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
def silu_times(gate, up, limit):
    """silu(gate) * up, in fp32. limit: what gate is cut to at most, and up to -limit..limit; None: neither is.

    NaN stays NaN.
    """
    if limit is not None:
        gate = tl.minimum(gate, limit, propagate_nan=tl.PropagateNan.ALL)
        up = tl.minimum(up, limit, propagate_nan=tl.PropagateNan.ALL)
        up = tl.maximum(up, -limit, propagate_nan=tl.PropagateNan.ALL)
    return silu(gate) * up


@triton.jit
def _silu_mul(out, x, limit, row_stride, size, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    gate = tl.load(x + row * row_stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + row * row_stride + size + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * size + column, silu_times(gate, up, limit).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _silu_mul_quantize(
    data,
    scale,
    x,
    limit,
    row_stride,
    size,
    num_groups,
    scale_stride,
    group_stride,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    column = group[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    gate = tl.load(x + row * row_stride + column, mask=column < size, other=0.0).to(tl.float32)
    up = tl.load(x + row * row_stride + size + column, mask=column < size, other=0.0).to(tl.float32)
    value = silu_times(gate, up, limit)
    store_quantized(data, scale, value, row, group, column, size, num_groups, scale_stride, group_stride)


def silu_mul_quantize(x_TI2: Tensor, padded_to: int = 1, limit: float | None = None) -> tuple[Tensor, Tensor]:
    """quantize_rows(silu_mul(x, limit), padded_to) without rounding in between."""
    return launch(_silu_mul_quantize, x_TI2, x_TI2.shape[1] // 2, padded_to, limit)


def silu_mul(x_TI2: Tensor, limit: float | None = None) -> Tensor:
    rows, size = x_TI2.shape[0], x_TI2.shape[1] // 2
    out_TI = x_TI2.new_empty(rows, size)
    if rows:
        _silu_mul[(rows, triton.cdiv(size, _BLOCK))](out_TI, x_TI2, limit, x_TI2.stride(0), size, BLOCK=_BLOCK)
    return out_TI
