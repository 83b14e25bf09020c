"""Dense products: cuBLAS for plain weights, the grouped product's kernel for fp8 ones."""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from eprt.ops.cuda.grouped_gemm import Tiling, grouped_gemm, num_sms
from eprt.ops.cuda.quantize import quantize_rows
from eprt.ops.weight import Weight

_SHORTEST_SPLIT = 768  # columns


def linear(x_MK: Tensor, w_NK: Weight, bias_N: Tensor | None = None, out_dtype: torch.dtype | None = None) -> Tensor:
    """As eprt.ops.linear.linear. bfloat16 x and fp8 weights: x is quantised, one scale per row and 128 columns.

    Kernels are chosen by the number of rows, so that a row's last bits may depend on how many there are.
    """
    out_dtype = out_dtype or x_MK.dtype
    if w_NK.scale is not None:
        y_MN = grouped_gemm(x_MK, w_NK)[0] if x_MK.dtype == torch.float32 else _fp8_linear(x_MK, w_NK, out_dtype)
    elif out_dtype != x_MK.dtype and x_MK.dtype == w_NK.data.dtype and x_MK.is_cuda:
        y_MN = torch.mm(x_MK, w_NK.data.T, out_dtype=out_dtype)
    else:
        y_MN = F.linear(x_MK.to(out_dtype), w_NK.data.to(out_dtype))
    if bias_N is not None:
        y_MN = y_MN + bias_N
    return y_MN.to(out_dtype)


def _fp8_linear(x_MK: Tensor, w_NK: Weight, out_dtype: torch.dtype) -> Tensor:
    """Few rows: K is split so that every SM reads weights."""
    data_MK, scale_MG = quantize_rows(x_MK)
    (M, K), N = x_MK.shape, w_NK.shape[0]
    block_m = min(max(16, triton.next_power_of_2(M)), 64 if M <= 512 else 128)
    tiling = Tiling(block_m, 128, 128, 4 if block_m <= 32 else 8, 4 if block_m <= 64 else 3, 2)
    tiles = triton.cdiv(M, block_m) * triton.cdiv(N, tiling.block_n)
    splits = max(1, min(2 * num_sms(x_MK.device) // max(tiles, 1), K // _SHORTEST_SPLIT))
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
