"""Rows by slot: where each token's rows go, the weighted sum of what comes back, and element-wise sums."""

import torch
from torch import Tensor


def add_rows(x_TH: Tensor, y_TH: Tensor, z_TH: Tensor | None) -> Tensor:
    """x + (y + z), rounded after each sum; x + y without z."""
    return x_TH + (y_TH if z_TH is None else y_TH + z_TH)


def place_rows(slot_TK: Tensor, num_slots: int) -> tuple[Tensor, Tensor, Tensor]:
    """(row_TK int64, token_R int64, count_E int32): a row for each entry, grouped by slot, inside a slot by (token, k).

    slot_TK: int32 or int64. An entry of -1 has row -1 and is counted in no slot; there are T * K rows all the same, and
    token_R names the tokens of such entries last.
    """
    slot_A = slot_TK.reshape(-1).long()
    entry_R = torch.where(slot_A < 0, num_slots, slot_A).argsort(stable=True)
    row_A = torch.empty_like(entry_R)
    row_A[entry_R] = torch.arange(len(entry_R))
    count_E = torch.bincount(slot_A + 1, minlength=num_slots + 1)[1:].int()
    return torch.where(slot_A < 0, -1, row_A).view(slot_TK.shape), entry_R // slot_TK.shape[1], count_E


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
