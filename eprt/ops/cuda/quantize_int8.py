"""Activations in int8 with one fp32 scale per row; scale = max / 127, data = value * (1 / scale), rounded.

Each function rounds where the separate operators round. A NaN makes the scale of its row NaN.
Knows nothing of the products that take these rows.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from eprt.ops.cuda.norm import normalised, row_warps
from eprt.ops.cuda.quantize import SMALLEST
from eprt.ops.cuda.silu import silu_times
from eprt.ops.weight import BLOCK

_SCALE_BLOCK = tl.constexpr(BLOCK)
# 1.5 * 2^23: adding it to a small fp32 number rounds that to the nearest integer, ties to even.
_ROUNDER = tl.constexpr(12582912.0)


@triton.jit
def _largest(value):
    """The largest absolute value; NaN if any is: as integers, the bits of NaN are larger than those of all numbers."""
    return tl.max(value.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0).to(tl.float32, bitcast=True)


@triton.jit
def _to_int8(x):
    """Rounded to even. x: a product, at most 127 but for rounding. The minimum keeps the compiler from fusing product
    and sum, which would round once less."""
    return ((tl.minimum(x, 127.0) + _ROUNDER) - _ROUNDER).to(tl.int8)


@triton.jit(do_not_specialize=["num_experts", "scale_stride"])
def _quantize_rows_int8(
    data,
    scale,
    x,
    x_scale,
    norm,
    count_E,
    limit,
    row_stride,
    scale_stride,
    size,
    eps,
    num_experts,
    GATED: tl.constexpr,
    DTYPE: tl.constexpr,
    EXPERTS: tl.constexpr,
    SIZE: tl.constexpr,
):
    """One program per row. x_scale: of e4m3 rows; norm: weight of the RMSNorm before; GATED: silu(gate) * up before,
    both cut to the limit. DTYPE: to which the values are rounded before they are quantised. Rows past the sum of
    count_E are left out."""
    row = tl.program_id(0).to(tl.int64)
    if count_E is not None:
        expert = tl.arange(0, EXPERTS)
        if row >= tl.sum(tl.load(count_E + expert, mask=expert < num_experts, other=0), 0):
            return
    column = tl.arange(0, SIZE)
    inside = column < size
    value = tl.load(x + row * row_stride + column, mask=inside, other=0.0).to(tl.float32)
    if x_scale is not None:
        value *= tl.load(x_scale + row * scale_stride + column // _SCALE_BLOCK, mask=inside, other=0.0)
    if GATED:
        up = tl.load(x + row * row_stride + size + column, mask=inside, other=0.0).to(tl.float32)
        value = silu_times(value, up, limit)
    if norm is not None:
        value = normalised(value, norm, column, size, eps)
    value = value.to(DTYPE).to(tl.float32)
    step = tl.maximum(tl.div_rn(_largest(value), 127.0), SMALLEST, propagate_nan=tl.PropagateNan.ALL)
    tl.store(scale + row, step)
    tl.store(data + row * size + column, _to_int8(value * tl.div_rn(1.0, step)), mask=inside)


def quantize_rows_int8(
    x_MK: Tensor,
    scale_MG: Tensor | None = None,
    recv_count_E: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(int8 [M, K], fp32 [M, 1]) of float32 or bfloat16 rows, or of e4m3 rows with scale_MG as rounded to bfloat16.

    recv_count_E: int32; rows past its sum are left undefined.
    """
    if (x_MK.dtype == torch.float8_e4m3fn) != (scale_MG is not None):
        raise ValueError(f"rows of {x_MK.dtype} {'without' if scale_MG is None else 'with'} scales: only e4m3 has them")
    return _launch(x_MK, x_MK.shape[1], scale_MG=scale_MG, recv_count_E=recv_count_E)


def silu_mul_quantize_int8(
    x_TI2: Tensor, recv_count_E: Tensor | None = None, limit: float | None = None
) -> tuple[Tensor, Tensor]:
    """quantize_rows_int8(silu_mul(x, limit), None, recv_count_E)"""
    return _launch(x_TI2, x_TI2.shape[1] // 2, recv_count_E=recv_count_E, gated=True, limit=limit)


def rms_norm_quantize_int8(x_TH: Tensor, weight_H: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """quantize_rows_int8(rms_norm(x, weight, eps))"""
    return _launch(x_TH, x_TH.shape[1], norm_H=weight_H, eps=eps)


def _launch(
    x: Tensor,
    size: int,
    *,
    scale_MG: Tensor | None = None,
    recv_count_E: Tensor | None = None,
    norm_H: Tensor | None = None,
    eps: float = 0.0,
    gated: bool = False,
    limit: float | None = None,
) -> tuple[Tensor, Tensor]:
    rows, num_experts = x.shape[0], 0 if recv_count_E is None else recv_count_E.shape[0]
    data_MK = torch.empty(rows, size, dtype=torch.int8, device=x.device)
    scale_M1 = torch.empty(rows, 1, dtype=torch.float32, device=x.device)
    if rows:
        block = triton.next_power_of_2(size)
        _quantize_rows_int8[(rows,)](
            data_MK,
            scale_M1,
            x,
            scale_MG,
            norm_H,
            recv_count_E,
            limit,
            x.stride(0),
            0 if scale_MG is None else scale_MG.stride(0),
            size,
            eps,
            num_experts,
            GATED=gated,
            DTYPE=tl.float32 if x.dtype == torch.float32 else tl.bfloat16,
            EXPERTS=triton.next_power_of_2(max(num_experts, 1)),
            SIZE=block,
            num_warps=row_warps(block),
        )
    return data_MK, scale_M1
