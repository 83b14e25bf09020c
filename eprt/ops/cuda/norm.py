"""RMSNorm, one program per row: fp32 inside, the input's dtype outside."""

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _rms_norm(
    out, total, x, residual, weight, row_stride, residual_stride, size, eps,
    ADD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < size
    value = tl.load(x + row * row_stride + column, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        value += tl.load(residual + row * residual_stride + column, mask=inside, other=0.0).to(tl.float32)
        rounded = value.to(total.dtype.element_ty)
        tl.store(total + row * size + column, rounded, mask=inside)
        value = rounded.to(tl.float32)
    scale = 1.0 / tl.sqrt_rn(tl.sum(value * value) / size + eps)
    factor = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * size + column, (value * scale * factor).to(out.dtype.element_ty), mask=inside)


def rms_norm(x_TH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
    return _launch(x_TH, None, weight_H, eps)[0]


def add_rms_norm(x_TH: Tensor, residual_TH: Tensor, weight_H: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return _launch(x_TH, residual_TH, weight_H, eps)


def _launch(x_TH: Tensor, residual_TH: Tensor | None, weight_H: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(norm, sum); the sum is empty without a residual."""
    rows, size = x_TH.shape
    out_TH, adds = x_TH.new_empty(rows, size), residual_TH is not None
    sum_TH = x_TH.new_empty(rows, size) if adds else out_TH
    other = residual_TH if adds else x_TH
    if rows:
        block = triton.next_power_of_2(size)
        _rms_norm[(rows,)](
            out_TH, sum_TH, x_TH, other, weight_H, x_TH.stride(0), other.stride(0), size, eps,
            ADD=adds, BLOCK=block, num_warps=min(16, max(1, block // 512)),
        )  # fmt: skip
    return out_TH, sum_TH
