"""The routed experts of a rank: two grouped products, the first of which includes SiLU-and-multiply and fp8 quantising.

An int8 row has one scale, known only when all tiles of its columns are: a small kernel between the products quantises
these rows. It moves 3 bytes per value, little beside the weights of few rows and the arithmetic of many. With many rows
it computes SiLU-and-multiply, too: one product of gate and up rows is then faster than one of pairs of tiles.

Where the host knows the counts and they are large, experts are computed one by one (experts_cublas.py). Knows nothing
of placements or of how rows arrived.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from eprt.ops.cuda import experts_cublas
from eprt.ops.cuda.grouped_bf16 import grouped_bf16
from eprt.ops.cuda.grouped_gemm import grouped_gemm
from eprt.ops.cuda.planes import to_planes
from eprt.ops.cuda.quantize import quantize_rows
from eprt.ops.cuda.quantize_int8 import quantize_rows_int8, silu_mul_quantize_int8
from eprt.ops.known_rows import KnownRows
from eprt.ops.signal import TileSignal
from eprt.ops.weight import BLOCK, Weight

_LEAST_UNGATED = 65  # int8 rows per expert from which SiLU-and-multiply is not part of the first product


@dataclass(frozen=True)
class GatedRows:
    """silu(gate) * up: what the first product hands to the second."""

    h_RI: Tensor  # e4m3, int8, bfloat16 or float32; for fp4 weights its planes [4, R, I / 4]
    scale_RG: Tensor | None  # fp32 scales of e4m3 or int8 rows
    dtype: torch.dtype  # of the experts' outputs
    recv_count_E: Tensor  # this and the following: as given to the first product
    matrix_E: Tensor | None
    expected_rows: int | None

    @property
    def device(self) -> torch.device:
        return self.h_RI.device


def grouped_experts(
    x_RH: Tensor,
    recv_count_E: Tensor,
    w13: Weight,
    w2: Weight,
    out_RH: Tensor | None = None,
    matrix_E: Tensor | None = None,
    scale_RG: Tensor | None = None,
    expected_rows: int | None = None,
    num_sms: int | None = None,
    known: KnownRows | None = None,
    limit: float | None = None,
) -> Tensor:
    """As eprt.ops.linear.grouped_experts, except where bfloat16 or e4m3 rows meet fp8 or int8 weights.

    Both products then multiply e4m3 by e4m3 or int8 by int8: rows that are not of the weights' format are quantised,
    and so is silu(gate) * up, with a scale per row and 128 columns (e4m3) or per row (int8). float32 rows are
    multiplied in float32 with any weights. fp4 weights become bfloat16, without rounding, and rows stay or become it.

    recv_count_E, matrix_E: int32 on the GPU; their values are not checked.
    expected_rows: about the sum of recv_count_E, when R is an upper bound; chooses the tiling, does not change results.
    num_sms: SMs to compute on; default: all.
    known: recv_count_E and matrix_E on the host; with many rows, experts are then computed one by one.
    """
    dtype = out_RH.dtype if out_RH is not None else torch.bfloat16 if scale_RG is not None else x_RH.dtype
    if known is not None and experts_cublas.is_faster(known, w13, w2, dtype):
        out_RH = x_RH.new_empty(x_RH.shape, dtype=dtype) if out_RH is None else out_RH
        if scale_RG is not None and (w13.scale is None or w13.is_fp4):
            x_RH, scale_RG = _dequantize(x_RH, scale_RG, dtype), None
        return experts_cublas.experts_one_by_one(x_RH, recv_count_E, w13, w2, out_RH, scale_RG, known, num_sms, limit)
    gated = experts_up(x_RH, recv_count_E, w13, matrix_E, scale_RG, dtype, expected_rows, num_sms, limit)
    return experts_down(gated, w2, out_RH, num_sms=num_sms)


def experts_up(
    x_RH: Tensor,
    recv_count_E: Tensor,
    w13: Weight,
    matrix_E: Tensor | None = None,
    scale_RG: Tensor | None = None,
    dtype: torch.dtype | None = None,
    expected_rows: int | None = None,
    num_sms: int | None = None,
    limit: float | None = None,
) -> GatedRows:
    """The first half of grouped_experts. dtype: of the outputs; default: x's, bfloat16 for e4m3 rows."""
    dtype = dtype or (torch.bfloat16 if scale_RG is not None else x_RH.dtype)
    kind = None if dtype == torch.float32 else w13.data.dtype
    fp8, int8, fp4 = (kind == each for each in (torch.float8_e4m3fn, torch.int8, torch.uint8))
    gated = True
    if int8:
        x_RH, scale_RG = quantize_rows_int8(x_RH, scale_RG, recv_count_E)
        rows = min(len(x_RH), expected_rows or len(x_RH))
        gated = rows < _LEAST_UNGATED * recv_count_E.shape[0]
    elif fp4:
        x_RH, scale_RG = to_planes(x_RH, scale_RG, recv_count_E), None
    elif scale_RG is not None and not fp8:
        x_RH, scale_RG = _dequantize(x_RH, scale_RG, dtype), None
    elif fp8 and scale_RG is None:
        x_RH, scale_RG = quantize_rows(x_RH)
    same = {"dtype": dtype, "expected_rows": expected_rows, "num_sms": num_sms}
    large_RI = grouped_bf16(x_RH, w13, recv_count_E, matrix_E, gated=True, limit=limit, **same)
    if large_RI is not None:
        return GatedRows(large_RI, None, dtype, recv_count_E, matrix_E, expected_rows)
    h_RI, h_scale = grouped_gemm(
        x_RH,
        w13,
        x_scale_RG=scale_RG,
        recv_count_E=recv_count_E,
        matrix_E=matrix_E,
        gated=gated,
        quantise=fp8,
        expected_rows=expected_rows,
        num_sms=num_sms,
        limit=limit,
        in_planes=fp4,
    )
    if int8 and gated:
        h_RI, h_scale = quantize_rows_int8(h_RI, None, recv_count_E)
    elif int8:
        h_RI, h_scale = silu_mul_quantize_int8(h_RI, recv_count_E, limit)
    return GatedRows(h_RI, h_scale, dtype, recv_count_E, matrix_E, expected_rows)


def experts_down(
    gated: GatedRows,
    w2: Weight,
    out_RH: Tensor | None = None,
    signal: TileSignal | None = None,
    num_sms: int | None = None,
) -> Tensor:
    """The second half of grouped_experts.

    signal: counts the stored tiles of out_RH while the rest is computed, for a kernel that waits for them on the SMs
        that num_sms leaves free.
    """
    if signal is None:
        same = {"dtype": gated.dtype, "expected_rows": gated.expected_rows, "num_sms": num_sms}
        y_RH = grouped_bf16(gated.h_RI, w2, gated.recv_count_E, gated.matrix_E, out_RN=out_RH, **same)
        if y_RH is not None:
            return y_RH
    return grouped_gemm(
        gated.h_RI,
        w2,
        x_scale_RG=gated.scale_RG,
        recv_count_E=gated.recv_count_E,
        matrix_E=gated.matrix_E,
        out_RN=out_RH,
        dtype=gated.dtype,
        expected_rows=gated.expected_rows,
        signal=signal,
        num_sms=num_sms,
    )[0]


def _dequantize(x_RH: Tensor, scale_RG: Tensor, dtype: torch.dtype) -> Tensor:
    return (x_RH.float() * scale_RG.repeat_interleave(BLOCK, dim=1)[:, : x_RH.shape[1]]).to(dtype)
