"""Products of groups of columns, each with a matrix of its own (DeepSeek-V4's first output projection), on CPUs.

T rows, G groups, K columns of a group, N outputs of each. Knows nothing of heads.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from eprt.ops.linear import linear
from eprt.ops.weight import Weight


def group_linear(x_TK: Tensor, w_GNK: Weight) -> Tensor:
    """[T, G * N]: the products of x's G groups of columns, side by side. Each is that of linear()."""
    return group_by_group(x_TK, w_GNK, linear)


def group_by_group(x_TK: Tensor, w_GNK: Weight, product: Callable[[Tensor, Weight], Tensor]) -> Tensor:
    """product: of one group's columns and its matrix. ValueError when shapes do not fit."""
    num_groups, columns = w_GNK.shape[0], w_GNK.shape[0] * w_GNK.shape[2]
    if x_TK.shape[1] != columns:
        raise ValueError(f"x has {x_TK.shape[1]} columns, {num_groups} groups of {w_GNK.shape[2]} are {columns}")
    parts = zip(x_TK.chunk(num_groups, dim=1), (w_GNK.matrix(i) for i in range(num_groups)))
    return torch.cat([product(group_TK, w_NK) for group_TK, w_NK in parts], dim=1)
