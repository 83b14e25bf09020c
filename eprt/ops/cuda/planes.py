"""Rows as products with fp4 weights take them: bfloat16 in four planes, of which plane j has the columns 4 i + j.

Rows that came as e4m3 are dequantised on the way, to what they are without fp4. Knows nothing of the products.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from eprt.ops.cuda.fp4_tile import PLANES
from eprt.ops.weight import BLOCK

_PLANES, _SCALE_BLOCK = tl.constexpr(PLANES), tl.constexpr(BLOCK)
_TILE = 512  # columns of a plane


@triton.jit(do_not_specialize=["num_rows", "num_experts", "scale_stride"])
def _to_planes(
    out,
    x,
    x_scale,
    count_E,
    row_stride,
    scale_stride,
    num_rows,
    size,
    num_experts,
    PLANE: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    if count_E is not None:
        expert = tl.arange(0, EXPERTS)
        if row >= tl.sum(tl.load(count_E + expert, mask=expert < num_experts, other=0), 0):
            return
    i, plane = tl.program_id(1) * PLANE + tl.arange(0, PLANE)[:, None], tl.arange(0, _PLANES)[None, :]
    column, inside = i * _PLANES + plane, i * _PLANES < size
    value = tl.load(x + row * row_stride + column, mask=inside, other=0.0)
    if x_scale is not None:
        scale = tl.load(x_scale + row * scale_stride + column // _SCALE_BLOCK, mask=inside, other=0.0)
        value = value.to(tl.float32) * scale
    to = out + (plane.to(tl.int64) * num_rows + row) * (size // _PLANES) + i
    tl.store(to, value.to(tl.bfloat16), mask=inside)


def to_planes(x_RK: Tensor, scale_RG: Tensor | None = None, recv_count_E: Tensor | None = None) -> Tensor:
    """bfloat16 [4, R, K / 4]. K is a multiple of 4.

    x_RK: bfloat16, or e4m3 with scale_RG, a scale per 128 columns.
    recv_count_E: int32; rows past its sum are left undefined.
    """
    (rows, size), num_experts = x_RK.shape, 0 if recv_count_E is None else recv_count_E.shape[0]
    out_4RQ = torch.empty(PLANES, rows, size // PLANES, dtype=torch.bfloat16, device=x_RK.device)
    if rows:
        tile = min(_TILE, triton.next_power_of_2(size // PLANES))
        _to_planes[(rows, triton.cdiv(size // PLANES, tile))](
            out_4RQ,
            x_RK,
            scale_RG,
            recv_count_E,
            x_RK.stride(0),
            0 if scale_RG is None else scale_RG.stride(0),
            rows,
            size,
            num_experts,
            PLANE=tile,
            EXPERTS=triton.next_power_of_2(max(num_experts, 1)),
        )
    return out_4RQ
