"""SiLU-and-multiply of a dense SwiGLU block. The experts' is part of their matrix product (grouped_gemm.py)."""

import triton
import triton.language as tl
from torch import Tensor

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


def silu_mul(x_TI2: Tensor) -> Tensor:
    rows, size = x_TI2.shape[0], x_TI2.shape[1] // 2
    out_TI = x_TI2.new_empty(rows, size)
    if rows:
        _silu_mul[(rows, triton.cdiv(size, _BLOCK))](out_TI, x_TI2, x_TI2.stride(0), size, BLOCK=_BLOCK)
    return out_TI
