"""A dispatch of more tokens than one takes: in rounds, as many as the rank with the most tokens needs."""

from collections.abc import Callable

import torch
from torch import Tensor

# x_TH, slot_idx_TK, weights_TK, rounds that this rank has left -> (y_TH, most rounds that any rank has left)
Exchanged = Callable[[Tensor, Tensor, Tensor, int], tuple[Tensor, int]]


def exchange_in_rounds(
    exchange: Exchanged, limit: int, x_TH: Tensor, slot_idx_TK: Tensor, weights_TK: Tensor
) -> Tensor:
    """[T, H], of rounds of at most `limit` tokens."""
    own_rounds = max(1, -(-x_TH.shape[0] // limit))
    all_rounds, parts = own_rounds, []
    while (done := len(parts)) < all_rounds:
        rows = slice(done * limit, (done + 1) * limit)
        y_TH, announced = exchange(x_TH[rows], slot_idx_TK[rows], weights_TK[rows], max(1, own_rounds - done))
        all_rounds = max(all_rounds, done + announced)
        parts.append(y_TH)
    return parts[0] if len(parts) == 1 else torch.cat(parts)
