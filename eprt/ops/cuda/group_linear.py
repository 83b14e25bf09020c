"""Products of groups of columns on GPUs: one launch for all groups where rows are few, else one product after another.

Knows nothing of heads.
"""

import torch
from torch import Tensor

from eprt.ops.cuda.grouped_gemm import grouped_gemm
from eprt.ops.cuda.linear import linear
from eprt.ops.cuda.quantize import quantize_rows
from eprt.ops.group_linear import group_by_group
from eprt.ops.weight import Weight

_FEW_ROWS = 128  # beyond them a product fills the GPU


def group_linear(x_TK: Tensor, w_GNK: Weight) -> Tensor:
    """As eprt.ops.group_linear.group_linear. bfloat16 x is quantised for fp8 and int8 weights, as by linear."""
    rows, (num_groups, n, k) = x_TK.shape[0], w_GNK.shape
    by_group_GTK = x_TK.view(rows, num_groups, k).transpose(0, 1)
    if w_GNK.scale is None and w_GNK.data.dtype == x_TK.dtype:
        y_GTN = torch.bmm(by_group_GTK, w_GNK.data.transpose(1, 2))
    elif w_GNK.data.dtype == torch.float8_e4m3fn and x_TK.dtype == torch.bfloat16 and rows <= _FEW_ROWS:
        data_RK, scale_RG = quantize_rows(by_group_GTK.reshape(-1, k))
        count_G = torch.full((num_groups,), rows, dtype=torch.int32, device=x_TK.device)
        y_RN = grouped_gemm(data_RK, w_GNK, x_scale_RG=scale_RG, recv_count_E=count_G, dtype=x_TK.dtype)[0]
        y_GTN = y_RN.view(num_groups, rows, n)
    else:
        return group_by_group(x_TK, w_GNK, linear)
    return y_GTN.transpose(0, 1).reshape(rows, num_groups * n)
