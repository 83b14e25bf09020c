"""Masks of tokens: takes away what a bit per token forbids. Knows nothing of why it is forbidden."""

import torch
from torch import Tensor

from eprt.ops import native


def mask_tokens(logits_XV: Tensor, bits_YB: Tensor, row_Y: Tensor) -> None:
    """Sets the logits of forbidden tokens to minus infinity, in some rows.

    logits_XV: fp32, the last dimension contiguous.
    bits_YB: uint8, contiguous, a multiple of 4 bytes per row: bit i % 8 of byte i // 8 allows token i.
    row_Y: int64, the row of logits that each mask is for.
    """
    num_rows, num_bytes = bits_YB.shape
    if logits_XV.dtype != torch.float32 or logits_XV.dim() != 2 or logits_XV.stride(1) != 1:
        raise ValueError(f"logits must be float32 [rows, vocabulary], got {logits_XV.dtype} {tuple(logits_XV.shape)}")
    if num_rows != len(row_Y) or num_bytes % 4 or 8 * num_bytes < logits_XV.shape[1]:
        raise ValueError(f"masks {tuple(bits_YB.shape)} do not fit {len(row_Y)} rows of {logits_XV.shape[1]} logits")
    native.load().mask_tokens(logits_XV, bits_YB, row_Y, torch.get_num_threads())
