"""Dense products: cuBLAS for plain weights, the grouped product's kernel for fp8 ones."""

import torch
import torch.nn.functional as F
from torch import Tensor

from eprt.ops.cuda.grouped_gemm import grouped_gemm
from eprt.ops.cuda.quantize import quantize_rows
from eprt.ops.weight import Weight


def linear(x_MK: Tensor, w_NK: Weight, bias_N: Tensor | None = None, out_dtype: torch.dtype | None = None) -> Tensor:
    """As eprt.ops.linear.linear. bfloat16 x and fp8 weights: x is quantised, one scale per row and 128 columns.

    cuBLAS chooses its kernel by the number of rows, so that a row's last bits may depend on how many there are.
    """
    out_dtype = out_dtype or x_MK.dtype
    if w_NK.scale is not None:
        if x_MK.dtype == torch.float32:
            y_MN = grouped_gemm(x_MK, w_NK)[0]
        else:
            x_MK, scale_MG = quantize_rows(x_MK)
            y_MN = grouped_gemm(x_MK, w_NK, x_scale_RG=scale_MG, dtype=out_dtype)[0]
    elif out_dtype != x_MK.dtype and x_MK.dtype == w_NK.data.dtype and x_MK.is_cuda:
        y_MN = torch.mm(x_MK, w_NK.data.T, out_dtype=out_dtype)
    else:
        y_MN = F.linear(x_MK.to(out_dtype), w_NK.data.to(out_dtype))
    if bias_N is not None:
        y_MN = y_MN + bias_N
    return y_MN.to(out_dtype)
