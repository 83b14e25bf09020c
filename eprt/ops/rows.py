"""Rows put back together: what the experts made of each token's copies, weighed and summed; and added up."""

import torch
from torch import Tensor


def add_rows(x_TH: Tensor, y_TH: Tensor, z_TH: Tensor | None) -> Tensor:
    """x + (y + z), rounded after each sum; z may be lacking."""
    return x_TH + (y_TH if z_TH is None else y_TH + z_TH)


def sum_rows(y_RH: Tensor, row_TK: Tensor, weight_TK: Tensor) -> Tensor:
    """[T, H] of y's dtype: the fp32 sum over k, in order, of weight * y[row]; entries with row -1 add nothing.

    row_TK: int64. weight_TK: fp32. Rows that no entry names may hold anything, also NaN.
    """
    sum_TH = torch.zeros(row_TK.shape[0], y_RH.shape[1], dtype=torch.float32)
    for k in range(row_TK.shape[1]):
        part_TH = y_RH[row_TK[:, k]].float() * weight_TK[:, k, None] if len(y_RH) else sum_TH
        sum_TH += part_TH.masked_fill(row_TK[:, k, None] < 0, 0.0)
    return sum_TH.to(y_RH.dtype)
