"""Counts which experts are chosen."""

import torch
from torch import Tensor


def count_choices(expert_idx_TK: Tensor, tokens_PE: Tensor, kept_TK: Tensor, num_decode: int) -> None:
    """Adds every choice to tokens_PE and copies it to kept_TK. -1, a masked choice, is not counted.

    tokens_PE: int64 [2, E], rows of any stride: choices of prompt tokens, then of decoded tokens.
    kept_TK: int32.
    num_decode: the first so many tokens are decoded ones.
    """
    kept_TK.copy_(expert_idx_TK)
    for phase, part in enumerate((expert_idx_TK[num_decode:], expert_idx_TK[:num_decode])):
        chosen_A = part[part >= 0]
        tokens_PE[phase].scatter_add_(0, chosen_A, torch.ones_like(chosen_A))
