"""Sums of rows: the weighted sum of a token's expert outputs, and element-wise sums."""

import torch
from torch import Tensor


def add_rows(x_TH: Tensor, y_TH: Tensor, z_TH: Tensor | None) -> Tensor:
    """x + (y + z), rounded after each sum; x + y without z."""
    return x_TH + (y_TH if z_TH is None else y_TH + z_TH)


def sum_rows(y_RH: Tensor, row_TK: Tensor, weight_TK: Tensor) -> Tensor:
    """[T, H] of y's dtype: the fp32 sum over k, in order, of weight * y[row].

    y_RH: rows that no entry names may hold anything, even NaN.
    row_TK: int64; an entry of -1 adds nothing.
    weight_TK: fp32.
    """
    sum_TH = torch.zeros(row_TK.shape[0], y_RH.shape[1], dtype=torch.float32)
    for k in range(row_TK.shape[1]):
        part_TH = y_RH[row_TK[:, k]].float() * weight_TK[:, k, None] if len(y_RH) else sum_TH
        sum_TH += part_TH.masked_fill(row_TK[:, k, None] < 0, 0.0)
    return sum_TH.to(y_RH.dtype)
