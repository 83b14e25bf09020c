"""Matrix products with weights [N, K]: dense layers, and the routed experts of a rank.

Batch-invariant: an output row depends on its own input row alone, so sampling is reproducible under any batch
composition. Accumulation is fp32; another instruction set may round differently. torch.get_num_threads() threads
compute; their number does not change a value. Knows nothing of placements or of how rows arrived.
"""

import math

import torch
from torch import Tensor

from eprt.ops import native
from eprt.ops.elementwise import rms_norm, silu_mul
from eprt.ops.known_rows import KnownRows
from eprt.ops.weight import BLOCK, Weight

_ACTIVATION_DTYPES = (torch.float32, torch.bfloat16)


def linear(x_MK: Tensor, w_NK: Weight, bias_N: Tensor | None = None, out_dtype: torch.dtype | None = None) -> Tensor:
    """y_MN = x W^T (+ bias). y has x's dtype, or out_dtype. ValueError when shapes or dtypes do not fit.

    x_MK: float32 or bfloat16; M may be 0.
    w_NK: fp8 and int8 weights are dequantised on the fly; activations keep x's precision.
    """
    n, k = _matrix_shape("w_NK", w_NK, 2)
    x_MK = _activations("x_MK", x_MK if out_dtype is None else x_MK.to(out_dtype), k)
    if bias_N is not None:
        if bias_N.shape != (n,):
            raise ValueError(f"bias_N has shape {tuple(bias_N.shape)}, the weight has {n} rows")
        bias_N = bias_N.to(torch.float32).contiguous()
    y_MN = x_MK.new_empty(x_MK.shape[0], n)
    native.load().linear(y_MN, x_MK, w_NK.data, w_NK.scale, bias_N, torch.get_num_threads())
    return y_MN


def silu_linear(x_MI2: Tensor, w_NI: Weight, limit: float | None = None) -> Tensor:
    """The second half of a SwiGLU block: linear(silu_mul(x, limit), w). x: [M, 2I], gate then up."""
    return linear(silu_mul(x_MI2, limit), w_NI)


def norm_linear(x_MK: Tensor, norm_weight_K: Tensor, eps: float, w_NK: Weight, bias_N: Tensor | None = None) -> Tensor:
    """linear(rms_norm(x), w, bias)."""
    return linear(rms_norm(x_MK, norm_weight_K, eps), w_NK, bias_N)


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
    """SwiGLU experts over rows grouped by expert, [R, H]: y = (silu(x Wg^T) * (x Wu^T)) Wd^T.

    x_RH: rows of expert 0, then of expert 1, ...; float32 or bfloat16, or e4m3 with scale_RG.
    recv_count_E: int32, rows of each expert. Their sum is at most R; rows past the sum are left unspecified.
    w13: [M, 2I, H], gate rows, then up rows.
    w2: [M, H, I].
    out_RH: where to write, contiguous, not overlapping x_RH. Default: a new tensor of x's dtype, bfloat16 for e4m3.
    matrix_E: int32, the index of each expert's matrix in w13 and w2. Default: expert e has matrix e, and M = E.
    scale_RG: fp32 scales of e4m3 rows, one per 128 columns.
    expected_rows, num_sms, known: for GPUs, unused here.
    limit: what enters silu is cut to at most this, what it is multiplied by to -limit..limit.

    silu(gate) * up enters the second product in float32, or in bfloat16 where the kernels multiply bfloat16 (bfloat16 x
    and AVX-512 or AMX). ValueError when shapes or dtypes do not fit.
    """
    num_matrices, gate_up, hidden = _matrix_shape("w13", w13, 3)
    num_experts = num_matrices if matrix_E is None else len(matrix_E)
    if matrix_E is not None and (matrix_E.dtype != torch.int32 or matrix_E.dim() != 1):
        raise ValueError(f"matrix_E must be int32 [E], got {matrix_E.dtype} {tuple(matrix_E.shape)}")
    if w2.shape != (num_matrices, hidden, gate_up // 2) or gate_up % 2:
        raise ValueError(f"w13 {tuple(w13.shape)} must be [E, 2I, H] and w2 {tuple(w2.shape)} [E, H, I]")
    if w2.data.dtype != w13.data.dtype:
        raise ValueError(f"w13 is {w13.data.dtype}, w2 is {w2.data.dtype}; both must have one dtype")
    if recv_count_E.shape != (num_experts,) or recv_count_E.dtype != torch.int32:
        raise ValueError(
            f"recv_count_E must be int32 [{num_experts}], got {recv_count_E.dtype} {tuple(recv_count_E.shape)}"
        )
    counts = recv_count_E.tolist()
    if num_experts and (min(counts) < 0 or sum(counts) > x_RH.shape[0]):
        raise ValueError(f"recv_count_E has minimum {min(counts)} and sum {sum(counts)}; x_RH has {len(x_RH)} rows")
    _matrix_shape("w2", w2, 3)
    if scale_RG is not None:
        rows, dtype = sum(counts), torch.bfloat16 if out_RH is None else out_RH.dtype
        x_RH = _dequantized(x_RH, scale_RG, rows, dtype)
    x_RH = _activations("x_RH", x_RH, hidden)
    y_RH = x_RH.new_empty(x_RH.shape[0], hidden) if out_RH is None else out_RH
    if y_RH.shape != x_RH.shape or y_RH.dtype != x_RH.dtype or not y_RH.is_contiguous():
        raise ValueError(
            f"out_RH must be contiguous {x_RH.dtype} {tuple(x_RH.shape)}, got {y_RH.dtype} {tuple(y_RH.shape)}"
        )
    counts_E, threads = recv_count_E.contiguous(), torch.get_num_threads()
    how = math.inf if limit is None else limit, threads
    native.load().grouped_experts(y_RH, x_RH, counts_E, matrix_E, w13.data, w13.scale, w2.data, w2.scale, *how)
    return y_RH


def _dequantized(x_RH: Tensor, scale_RG: Tensor, num_rows: int, dtype: torch.dtype) -> Tensor:
    """The rows times their scales. Only the first num_rows hold values: buffers of a static shape are longer."""
    out_RH = torch.empty(x_RH.shape, dtype=dtype)
    scale_RH = scale_RG[:num_rows].repeat_interleave(BLOCK, dim=1)[:, : x_RH.shape[1]]
    out_RH[:num_rows] = x_RH[:num_rows].float() * scale_RH
    return out_RH


def _matrix_shape(name: str, w: Weight, dim: int) -> torch.Size:
    """The weight's shape. ValueError unless it has `dim` dimensions and is contiguous."""
    if w.data.dim() != dim:
        raise ValueError(f"{name} must have {dim} dimensions, got {tuple(w.shape)}")
    if not w.data.is_contiguous() or (w.scale is not None and not w.scale.is_contiguous()):
        raise ValueError(f"{name} must be contiguous (its data has strides {w.data.stride()}); call .contiguous() once")
    return w.shape


def _activations(name: str, x: Tensor, width: int) -> Tensor:
    """x with contiguous rows, any distance apart. ValueError unless x is [rows, width] of float32 or bfloat16."""
    if x.dim() != 2 or x.shape[1] != width:
        raise ValueError(f"{name} must be [rows, {width}] to fit the weight, got {tuple(x.shape)}")
    if x.dtype not in _ACTIVATION_DTYPES:
        raise ValueError(f"{name} must be float32 or bfloat16, got {x.dtype}")
    return x if x.stride(1) == 1 else x.contiguous()
