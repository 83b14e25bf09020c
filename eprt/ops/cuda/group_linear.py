"""Products of groups of columns on GPUs: one launch for all groups where rows are few, else one product after another.

Knows nothing of heads.
"""

import torch
from torch import Tensor

from eprt.gpu import cluster_product
from eprt.gpu.cluster_product import ClusterTiling
from eprt.ops.cuda.grouped_gemm import grouped_gemm
from eprt.ops.cuda.linear import cluster_takes, linear
from eprt.ops.cuda.quantize import quantize_rows
from eprt.ops.group_linear import group_by_group
from eprt.ops.tuning import Tiling, tuned_dense
from eprt.ops.weight import BLOCK, Weight

_FEW_ROWS = 128  # beyond them a product fills the GPU


def group_linear(x_TK: Tensor, w_GNK: Weight) -> Tensor:
    """As eprt.ops.group_linear.group_linear. bfloat16 x is quantised for fp8 and int8 weights, as by linear."""
    rows, (num_groups, n, k) = x_TK.shape[0], w_GNK.shape
    is_fp8 = w_GNK.data.dtype == torch.float8_e4m3fn and x_TK.dtype == torch.bfloat16
    if w_GNK.scale is None and w_GNK.data.dtype == x_TK.dtype:
        by_group_GTK = x_TK.view(rows, num_groups, k).transpose(0, 1)
        y_GTN = torch.bmm(by_group_GTK, w_GNK.data.transpose(1, 2))
        return y_GTN.transpose(0, 1).reshape(rows, num_groups * n)
    if not is_fp8 or rows > _FEW_ROWS or x_TK.shape[1] != num_groups * k:
        return group_by_group(x_TK, w_GNK, linear)
    known, tiling = tuned_dense(x_TK.device, n, k, rows, matrices=num_groups)
    if known and tiling is None:
        return group_by_group(x_TK, w_GNK, linear)
    if isinstance(tiling, ClusterTiling) and k % BLOCK == 0 and cluster_takes(w_GNK, rows, x_TK.dtype, tiling):
        return cluster_groups(x_TK, w_GNK, tiling)
    return grouped(x_TK, w_GNK, tiling if isinstance(tiling, Tiling) else None)


def cluster_groups(x_TK: Tensor, w_GNK: Weight, tiling: ClusterTiling) -> Tensor:
    """Blocks of columns that share a scale end where groups do, so rows are quantised as they are."""
    assert w_GNK.scale is not None
    quantised = quantize_rows(x_TK, padded_to=cluster_product.PADDED_TO)
    return cluster_product.cluster_product(*quantised, w_GNK.data, w_GNK.scale, len(x_TK), tiling)


def grouped(x_TK: Tensor, w_GNK: Weight, tiling: Tiling | None) -> Tensor:
    """As experts, of which each has all rows."""
    rows, (num_groups, n, k) = len(x_TK), w_GNK.shape
    by_group_GTK = x_TK.view(rows, num_groups, k).transpose(0, 1)
    data_RK, scale_RG = quantize_rows(by_group_GTK.reshape(-1, k))
    count_G = torch.full((num_groups,), rows, dtype=torch.int32, device=x_TK.device)
    y_RN, _ = grouped_gemm(data_RK, w_GNK, x_scale_RG=scale_RG, recv_count_E=count_G, dtype=x_TK.dtype, tiling=tiling)
    return y_RN.view(num_groups, rows, n).transpose(0, 1).reshape(rows, num_groups * n)
