"""The routed experts of a rank: two grouped products, the first with SiLU-and-multiply and quantisation inside."""

import torch
from torch import Tensor

from eprt.ops.cuda.grouped_gemm import grouped_gemm
from eprt.ops.cuda.quantize import quantize_rows
from eprt.ops.weight import BLOCK, Weight


def grouped_experts(
    x_RH: Tensor,
    recv_count_E: Tensor,
    w13: Weight,
    w2: Weight,
    out_RH: Tensor | None = None,
    storage_E: Tensor | None = None,
    scale_RG: Tensor | None = None,
) -> Tensor:
    """As eprt.ops.linear.grouped_experts, except where bfloat16 or e4m3 rows meet fp8 weights.

    There both products multiply e4m3 by e4m3: rows that are not yet e4m3 (with scale_RG) are quantised, and so is
    silu(gate) * up, with a scale per row and 128 columns. float32 rows are multiplied in float32 with any weights.
    recv_count_E and storage_E: int32 on the GPU; their values are not checked.
    """
    dtype = out_RH.dtype if out_RH is not None else torch.bfloat16 if scale_RG is not None else x_RH.dtype
    fp8 = w13.data.dtype == torch.float8_e4m3fn and dtype != torch.float32
    if scale_RG is not None and not fp8:
        x_RH, scale_RG = _dequantize(x_RH, scale_RG, dtype), None
    if fp8 and scale_RG is None:
        x_RH, scale_RG = quantize_rows(x_RH)
    where = {"recv_count_E": recv_count_E, "storage_E": storage_E}
    h_RI, h_scale = grouped_gemm(x_RH, w13, x_scale_RG=scale_RG, gated=True, quantise=fp8, **where)
    return grouped_gemm(h_RI, w2, x_scale_RG=h_scale, out_RN=out_RH, dtype=dtype, **where)[0]


def _dequantize(x_RH: Tensor, scale_RG: Tensor, dtype: torch.dtype) -> Tensor:
    return (x_RH.float() * scale_RG.repeat_interleave(BLOCK, dim=1)[:, : x_RH.shape[1]]).to(dtype)
