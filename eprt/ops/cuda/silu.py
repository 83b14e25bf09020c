"""SiLU-and-multiply of a dense SwiGLU block, in bf16 or quantised at once. The experts' is part of their matrix product
(grouped_gemm.py)."""

import triton
import triton.language as tl
from torch import Tensor

from eprt.ops.cuda.quantize import GROUPS, SMALLEST, empty_quantized
from eprt.ops.weight import BLOCK

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
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    column = group[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    gate = tl.load(x + row * row_stride + column, mask=column < size, other=0.0).to(tl.float32)
    up = tl.load(x + row * row_stride + size + column, mask=column < size, other=0.0).to(tl.float32)
    value = silu(gate) * up
    factor = tl.maximum(tl.max(tl.abs(value), axis=1) / 448.0, SMALLEST)
    tl.store(scale + row * scale_stride + group * group_stride, factor, mask=group < num_groups)
    tl.store(data + row * size + column, (value / factor[:, None]).to(data.dtype.element_ty), mask=column < size)


def silu_mul_quantize(x_TI2: Tensor, padded_to: int = 1) -> tuple[Tensor, Tensor]:
    """quantize_rows(silu_mul(x), padded_to), without rounding in between."""
    rows, size = x_TI2.shape[0], x_TI2.shape[1] // 2
    data_TI, scale_TG = empty_quantized(rows, size, padded_to, x_TI2.device)
    if rows:
        groups = triton.cdiv(size, BLOCK)
        _silu_mul_quantize[(rows, triton.cdiv(groups, GROUPS))](
            data_TI, scale_TG, x_TI2, x_TI2.stride(0), size, groups, scale_TG.stride(0), scale_TG.stride(1),
            GROUPS=GROUPS, SIZE=BLOCK,
        )  # fmt: skip
    return data_TI, scale_TG


def silu_mul(x_TI2: Tensor) -> Tensor:
    rows, size = x_TI2.shape[0], x_TI2.shape[1] // 2
    out_TI = x_TI2.new_empty(rows, size)
    if rows:
        _silu_mul[(rows, triton.cdiv(size, _BLOCK))](out_TI, x_TI2, x_TI2.stride(0), size, BLOCK=_BLOCK)
    return out_TI
