"""Masks of tokens: one program per piece of a row. A forbidden token is stored, an allowed one is not even read."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


@triton.jit(do_not_specialize=["vocab_size"])
def _mask_tokens(logits, words, row, logits_stride, words_stride, vocab_size, BLOCK: tl.constexpr):
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < vocab_size
    word = tl.load(words + tl.program_id(0) * words_stride + at // 32, mask=inside, other=0)
    forbidden = ((word >> (at % 32)) & 1) == 0
    start = logits + tl.load(row + tl.program_id(0)) * logits_stride
    tl.store(start + at, float("-inf"), mask=inside & forbidden)


def mask_tokens(logits_XV: Tensor, bits_YB: Tensor, row_Y: Tensor) -> None:
    """As eprt.ops.token_mask.mask_tokens; nothing waits for the GPU."""
    num_rows, vocab_size = len(row_Y), logits_XV.shape[1]
    if num_rows:
        words_YW = bits_YB.view(torch.int32)
        grid = num_rows, triton.cdiv(vocab_size, _BLOCK)
        _mask_tokens[grid](
            logits_XV, words_YW, row_Y, logits_XV.stride(0), words_YW.stride(0), vocab_size, BLOCK=_BLOCK
        )
