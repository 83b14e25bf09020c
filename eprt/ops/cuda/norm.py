"""RMSNorm in fp32, one program per row, optionally quantised in the same kernel."""

import triton
import triton.language as tl
from torch import Tensor

from eprt.ops.cuda.quantize import new_quantized, store_quantized
from eprt.ops.weight import BLOCK


@triton.jit
def normalised(value, weight, column, size, eps):
    """The RMSNorm of a row. value: fp32, of any shape, 0 past the row's end; column: of each value."""
    factor = 1.0 / tl.sqrt_rn(tl.sum(value * value) / size + eps)
    return value * factor * tl.load(weight + column, mask=column < size, other=0.0).to(tl.float32)


def row_warps(block: int) -> int:
    """Of a program that has a row of up to `block` values in its registers."""
    return min(16, max(1, block // 512))


@triton.jit
def rms_norm_kernel(
    out, total, x, residual, weight, row_stride, residual_stride, size, eps, ADD: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < size
    value = tl.load(x + row * row_stride + column, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        value += tl.load(residual + row * residual_stride + column, mask=inside, other=0.0).to(tl.float32)
        rounded = value.to(total.dtype.element_ty)
        tl.store(total + row * size + column, rounded, mask=inside)
        value = rounded.to(tl.float32)
    value = normalised(value, weight, column, size, eps)
    tl.store(out + row * size + column, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _rms_norm_quantize(
    data,
    scale,
    x,
    weight,
    row_stride,
    size,
    eps,
    num_groups,
    scale_stride,
    group_stride,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, GROUPS)
    column = group[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    value = tl.load(x + row * row_stride + column, mask=column < size, other=0.0).to(tl.float32)
    value = normalised(value, weight, column, size, eps)
    value = value.to(x.dtype.element_ty).to(tl.float32)  # round where the separate norm rounds
    store_quantized(data, scale, value, row, group, column, size, num_groups, scale_stride, group_stride)


def rms_norm_quantize(x_TH: Tensor, weight_H: Tensor, eps: float, padded_to: int = 1) -> tuple[Tensor, Tensor]:
    """quantize_rows(rms_norm(x, weight, eps), padded_to)"""
    (rows, size), groups = x_TH.shape, triton.cdiv(x_TH.shape[1], BLOCK)
    data_MK, scale_MG = new_quantized(x_TH, size, padded_to)
    if rows:
        block = triton.next_power_of_2(groups)
        _rms_norm_quantize[(rows,)](
            data_MK,
            scale_MG,
            x_TH,
            weight_H,
            x_TH.stride(0),
            size,
            eps,
            groups,
            *scale_MG.stride(),
            GROUPS=block,
            SIZE=BLOCK,
            num_warps=row_warps(block * BLOCK),
        )
    return data_MK, scale_MG


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
        rms_norm_kernel[(rows,)](
            out_TH,
            sum_TH,
            x_TH,
            other,
            weight_H,
            x_TH.stride(0),
            other.stride(0),
            size,
            eps,
            ADD=adds,
            BLOCK=block,
            num_warps=row_warps(block),
        )
    return out_TH, sum_TH
