"""Checksums of many pages of a GPU's KV cache by one launch, and few thread blocks: most SMs stay free for steps."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from eprt.ops.checksum import FIRST, PLACE, SECOND, SHIFT

_PROGRAMS, _BLOCK = 32, 4096
_PLACE, _FIRST, _SECOND, _SHIFT = (tl.constexpr(value) for value in (PLACE, FIRST, SECOND, SHIFT))


@triton.jit(do_not_specialize=["num_rows", "num_layers", "row_words", "layer_words", "first"])
def _add_page_checksums(
    total_N, page_N, words, num_rows, num_layers, row_words, layer_words, first, BLOCK: tl.constexpr, MASK: tl.constexpr
):
    # A row is a page in one layer.
    for row in range(tl.program_id(0), num_rows, tl.num_programs(0)):
        n, layer = row // num_layers, row % num_layers
        page = tl.load(page_N + n)
        begin = layer.to(tl.int64) * layer_words + page * row_words
        place = layer.to(tl.int64) * row_words + first
        acc = tl.zeros([BLOCK], tl.uint64)
        for start in range(0, row_words, BLOCK):
            at = start + tl.arange(0, BLOCK)
            inside = at < row_words
            word = (tl.load(words + begin + at, mask=inside, other=0).to(tl.int64) & MASK).to(tl.uint64)
            mixed = (word ^ ((at.to(tl.int64) + place).to(tl.uint64) * _PLACE)) * _FIRST
            mixed = (mixed ^ (mixed >> _SHIFT)) * _SECOND
            acc += tl.where(inside, mixed, 0)
        tl.atomic_add(total_N + n, tl.sum(acc, 0).to(tl.int64, bitcast=True), sem="relaxed")


def add_page_checksums(bytes_LPB: Tensor, page_N: Tensor, total_N: Tensor, first: int = 0) -> None:
    """Adds to total_N (int64) the checksum of each of these pages (int64, below P) in all layers: that of add_checksum
    for its bytes, layer after layer. first: the place of its first word. Nothing waits for the GPU."""
    num_layers, num_pages, row_bytes = bytes_LPB.shape
    size = 4 if bytes_LPB.data_ptr() % 4 == 0 and row_bytes % 4 == 0 else 1
    words = bytes_LPB.view(torch.int32) if size == 4 else bytes_LPB
    num_rows, row_words = len(page_N) * num_layers, row_bytes // size
    _add_page_checksums[(min(_PROGRAMS, num_rows),)](
        total_N,
        page_N,
        words,
        num_rows,
        num_layers,
        row_words,
        num_pages * row_words,
        first,
        BLOCK=_BLOCK,
        MASK=0xFFFFFFFF if size == 4 else 0xFF,
        num_warps=8,
    )
