"""Dense products: cuBLAS; for int8 weights, and for few rows of fp8 weights, kernels that split K."""

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from eprt.gpu import cluster_product
from eprt.gpu.cluster_product import ClusterTiling
from eprt.ops.cuda import cublas
from eprt.ops.cuda.grouped_gemm import FP8, INT8, count_sms, grouped_gemm, tiling_of
from eprt.ops.cuda.norm import rms_norm, rms_norm_quantize
from eprt.ops.cuda.quantize import quantize_rows
from eprt.ops.cuda.quantize_int8 import quantize_rows_int8, rms_norm_quantize_int8, silu_mul_quantize_int8
from eprt.ops.cuda.silu import silu_mul, silu_mul_quantize
from eprt.ops.tuning import Tiling, tuned_dense
from eprt.ops.weight import Weight

_SHORTEST_SPLIT = 768  # columns


def linear(x_MK: Tensor, w_NK: Weight, bias_N: Tensor | None = None, out_dtype: torch.dtype | None = None) -> Tensor:
    """As eprt.ops.linear.linear. bfloat16 x is quantised for fp8 weights, with a scale per row and 128 columns, and for
    int8 weights, with a scale per row; fp4 weights become bfloat16 instead, without rounding.

    The kernel depends on the number of rows, so a row's last bits may depend on how many there are.
    """
    out_dtype = out_dtype or x_MK.dtype
    if w_NK.scale is not None and x_MK.dtype == torch.float32:
        y_MN = grouped_gemm(x_MK, w_NK)[0]
    elif w_NK.is_fp4:
        y_MN = grouped_gemm(x_MK, w_NK, dtype=out_dtype)[0]
    elif w_NK.data.dtype == torch.int8:
        y_MN = _int8_linear(*quantize_rows_int8(x_MK), w_NK, out_dtype)
    elif w_NK.scale is not None:
        y_MN = fp8_linear(x_MK, w_NK, out_dtype)
    elif out_dtype != x_MK.dtype and x_MK.dtype == w_NK.data.dtype and x_MK.is_cuda:
        y_MN = torch.mm(x_MK, w_NK.data.T, out_dtype=out_dtype)
    else:
        y_MN = F.linear(x_MK.to(out_dtype), w_NK.data.to(out_dtype))
    if bias_N is not None:
        y_MN = y_MN + bias_N
    return y_MN.to(out_dtype)


def silu_linear(x_MI2: Tensor, w_NI: Weight, limit: float | None = None) -> Tensor:
    """As eprt.ops.linear.silu_linear. bfloat16 x is quantised for fp8 or int8 weights by the kernel of silu_mul."""
    if w_NI.scale is None or w_NI.is_fp4 or x_MI2.dtype == torch.float32:
        return linear(silu_mul(x_MI2, limit), w_NI)
    if w_NI.data.dtype == torch.int8:
        return _int8_linear(*silu_mul_quantize_int8(x_MI2, limit=limit), w_NI, x_MI2.dtype)

    def quantise(x_MI2: Tensor, padded_to: int = 1) -> tuple[Tensor, Tensor]:
        return silu_mul_quantize(x_MI2, padded_to, limit)

    return fp8_linear(x_MI2, w_NI, x_MI2.dtype, quantise)


def norm_linear(x_MK: Tensor, norm_weight_K: Tensor, eps: float, w_NK: Weight, bias_N: Tensor | None = None) -> Tensor:
    """As eprt.ops.linear.norm_linear. bfloat16 x is quantised for fp8 or int8 weights by the kernel of the norm."""
    if w_NK.scale is None or w_NK.is_fp4 or x_MK.dtype == torch.float32:
        return linear(rms_norm(x_MK, norm_weight_K, eps), w_NK, bias_N)
    if w_NK.data.dtype == torch.int8:
        y_MN = _int8_linear(*rms_norm_quantize_int8(x_MK, norm_weight_K, eps), w_NK, x_MK.dtype)
        return y_MN if bias_N is None else (y_MN + bias_N).to(x_MK.dtype)

    def quantise(x_MK: Tensor, padded_to: int = 1) -> tuple[Tensor, Tensor]:
        return rms_norm_quantize(x_MK, norm_weight_K, eps, padded_to)

    y_MN = fp8_linear(x_MK, w_NK, x_MK.dtype, quantise)
    return y_MN if bias_N is None else (y_MN + bias_N).to(x_MK.dtype)


def _int8_linear(data_MK: Tensor, scale_M1: Tensor, w_NK: Weight, out_dtype: torch.dtype) -> Tensor:
    (n, k), rows, device = w_NK.shape, data_MK.shape[0], data_MK.device
    tiling = tuned_dense(device, n, k, rows, "dense int8")[1] or _splitting(device, INT8, rows, n, k)
    assert isinstance(tiling, Tiling), "cluster products are of fp8"
    return split_gemm(data_MK, scale_M1, w_NK, out_dtype, tiling)


def fp8_linear(
    x_MK: Tensor, w_NK: Weight, out_dtype: torch.dtype, quantise: Callable[..., tuple[Tensor, Tensor]] = quantize_rows
) -> Tensor:
    """The product of fp8 weights and of x, quantised by `quantise`, by the fastest kernel for so many rows."""
    rows = x_MK.shape[0]
    tiling = _tiling(w_NK, rows, out_dtype)
    if isinstance(tiling, ClusterTiling):
        assert w_NK.scale is not None
        quantised = quantise(x_MK, padded_to=cluster_product.PADDED_TO)
        return cluster_product.cluster_product(*quantised, w_NK.data, w_NK.scale, rows, tiling)
    if tiling is not None or not cublas.can_multiply(w_NK, out_dtype):
        tiling = tiling or _splitting(x_MK.device, FP8, rows, *w_NK.shape)
        return split_gemm(*quantise(x_MK), w_NK, out_dtype, tiling)
    return cublas.scaled_mm(*quantise(x_MK, padded_to=cublas.PADDED_TO), w_NK)[:rows]


def _tiling(w_NK: Weight, rows: int, out_dtype: torch.dtype) -> Tiling | ClusterTiling | None:
    """The tiling with which K is split; None where cuBLAS is faster.

    Measurements of this shape decide (ops/tunings). Without them, those of similar shapes on an H200: K is split for
    few rows, and for a long K with too few tiles for all SMs.
    """
    (n, k), device = w_NK.shape, w_NK.data.device
    known, tiling = tuned_dense(device, n, k, rows)
    if known and (not isinstance(tiling, ClusterTiling) or cluster_takes(w_NK, rows, out_dtype, tiling)):
        return tiling
    few = rows <= 32 or (k >= 4096 and rows <= (128 if n <= 4096 else 64))
    return _splitting(device, FP8, rows, n, k) if few else None


def cluster_takes(w_NK: Weight, rows: int, out_dtype: torch.dtype, tiling: ClusterTiling) -> bool:
    """Whether the cluster kernel is available and computes this product."""
    if out_dtype != torch.bfloat16 or w_NK.data.dtype != torch.float8_e4m3fn:
        return False
    return cluster_product.is_built(w_NK.data.device.index, cluster_product.tokens_of(rows), tiling)


def _splitting(device: torch.device, kind: int, rows: int, n: int, k: int) -> Tiling:
    """A tiling with enough parts of K for every SM to read weights, but none too short."""
    tiling = tiling_of(kind, min(rows, 64) if kind == FP8 else rows, gated=False)
    tiles = triton.cdiv(rows, tiling.block_m) * triton.cdiv(n, tiling.block_n)
    return replace(tiling, splits=max(1, min(2 * count_sms(device) // max(tiles, 1), k // _SHORTEST_SPLIT)))


def split_gemm(data_MK: Tensor, scale_MG: Tensor, w_NK: Weight, out_dtype: torch.dtype, tiling: Tiling) -> Tensor:
    """The product in one part or, for few rows, in parts of K that are computed separately, then added."""
    splits = tiling.splits
    y = grouped_gemm(data_MK, w_NK, x_scale_RG=scale_MG, dtype=out_dtype, tiling=tiling, splits=splits)[0]
    return y if splits == 1 else _add_parts(y, out_dtype)


@triton.jit(do_not_specialize=["num_parts"])
def _add(out, parts, size, num_parts, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for part in range(num_parts):
        total += tl.load(parts + part * size + at, mask=at < size, other=0.0)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=at < size)


def _add_parts(y_SMN: Tensor, dtype: torch.dtype) -> Tensor:
    out_MN = torch.empty(y_SMN.shape[1:], dtype=dtype, device=y_SMN.device)
    if out_MN.numel():
        _add[(triton.cdiv(out_MN.numel(), 1024),)](out_MN, y_SMN, out_MN.numel(), len(y_SMN), BLOCK=1024)
    return out_MN
