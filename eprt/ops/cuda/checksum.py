"""A checksum of GPU memory, by few thread blocks, so that most SMs stay free for other kernels."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from eprt.ops.checksum import FIRST, PLACE, SECOND, SHIFT, word_bytes

_PROGRAMS, _BLOCK = 16, 8192
_PLACE, _FIRST, _SECOND, _SHIFT = (tl.constexpr(value) for value in (PLACE, FIRST, SECOND, SHIFT))


@triton.jit(do_not_specialize=["num_words", "first"])
def _add_checksum(total, words, num_words, first, BLOCK: tl.constexpr, MASK: tl.constexpr):
    acc = tl.zeros([BLOCK], tl.uint64)
    for start in range(tl.program_id(0) * BLOCK, num_words, tl.num_programs(0) * BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < num_words
        word = (tl.load(words + at, mask=inside, other=0).to(tl.int64) & MASK).to(tl.uint64)
        mixed = (word ^ ((at.to(tl.int64) + first).to(tl.uint64) * _PLACE)) * _FIRST
        mixed = (mixed ^ (mixed >> _SHIFT)) * _SECOND
        acc += tl.where(inside, mixed, 0)
    tl.atomic_add(total, tl.sum(acc, 0).to(tl.int64, bitcast=True), sem="relaxed")


def add_checksum(bytes_B: Tensor, total: Tensor, first: int = 0) -> None:
    """As eprt.ops.checksum.add_checksum; nothing waits for the GPU."""
    wide = word_bytes(bytes_B) == 4
    words = bytes_B.view(torch.int32) if wide else bytes_B
    mask = 0xFFFFFFFF if wide else 0xFF
    grid = (min(_PROGRAMS, triton.cdiv(len(words), _BLOCK)),)
    _add_checksum[grid](total, words, len(words), first, BLOCK=_BLOCK, MASK=mask, num_warps=8)
