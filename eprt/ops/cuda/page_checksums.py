"""Checksums of many pages of a GPU's KV cache by one launch, and few thread blocks: most SMs stay free for steps."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from eprt.ops.checksum import FIRST, PLACE, SECOND, SHIFT, WIDE_WORDS, word_bytes

# Each thread has 8 loads of 16 bytes under way: two 8-byte words in each layer. ptxas 12.8 puts all of them first only
# if it is allowed more registers than the 62 that it then needs.
_PROGRAMS, _LAYERS, _BLOCK, _WARPS, _REGISTERS = 32, 8, 1024, 16, 96
_PLACE, _FIRST, _SECOND, _SHIFT = (tl.constexpr(value) for value in (PLACE, FIRST, SECOND, SHIFT))
_WORDS = {8: torch.int64, 4: torch.int32, 1: torch.uint8}


@triton.jit(do_not_specialize=["num_sums", "num_layers", "num_pages", "first"])
def _add_page_checksums(
    total_N,
    page_N,
    words,
    num_sums,
    num_layers,
    num_pages,
    first,
    ROW: tl.constexpr,
    LAYERS: tl.constexpr,
    BLOCK: tl.constexpr,
    MASK: tl.constexpr,
):
    # A program takes LAYERS layers of a page at a time. ROW: words of a page in one layer; as a constant it tells the
    # compiler which loads are aligned.
    num_groups = tl.cdiv(num_layers, LAYERS)
    for item in range(tl.program_id(0), num_sums * num_groups, tl.num_programs(0)):
        n = item // num_groups
        page = tl.load(page_N + n)
        layer_L = (item % num_groups * LAYERS + tl.arange(0, LAYERS)).to(tl.int64)
        begin_L = (layer_L * num_pages + page) * ROW
        place_L = (layer_L * ROW + first).to(tl.uint64) * _PLACE
        acc_B = tl.zeros([BLOCK], tl.uint64)
        for start in range(0, ROW, BLOCK):
            at_B = start + tl.arange(0, BLOCK)
            inside_LB = (layer_L < num_layers)[:, None] & (at_B < ROW)[None, :]
            word_LB = tl.load(words + begin_L[:, None] + at_B[None, :], mask=inside_LB, other=0).to(tl.int64)
            if MASK:  # a shorter word has been extended by its sign
                word_LB &= MASK
            place_LB = place_L[:, None] + (at_B.to(tl.uint64) * _PLACE)[None, :]
            mixed_LB = (word_LB.to(tl.uint64) ^ place_LB) * _FIRST
            mixed_LB = (mixed_LB ^ (mixed_LB >> _SHIFT)) * _SECOND
            acc_B += tl.sum(tl.where(inside_LB, mixed_LB, 0), 0)
        tl.atomic_add(total_N + n, tl.sum(acc_B, 0).to(tl.int64, bitcast=True), sem="relaxed")


def add_page_checksums(bytes_LPB: Tensor, page_N: Tensor, total_N: Tensor, first: int = 0) -> None:
    """Adds to total_N (int64) the checksum of each of these pages (int64, below P) in all layers: that of add_checksum
    for its bytes, layer after layer, in words of a size of WIDE_WORDS. first: the place of its first word. Nothing
    waits for the GPU."""
    num_layers, num_pages, row_bytes = bytes_LPB.shape
    size = word_bytes(bytes_LPB, WIDE_WORDS)
    num_items = len(page_N) * triton.cdiv(num_layers, _LAYERS)
    _add_page_checksums[(min(_PROGRAMS, num_items),)](
        total_N,
        page_N,
        bytes_LPB.view(_WORDS[size]),
        len(page_N),
        num_layers,
        num_pages,
        first,
        ROW=row_bytes // size,
        LAYERS=_LAYERS,
        BLOCK=_BLOCK,
        MASK=(1 << 8 * size) - 1 if size < 8 else 0,
        num_warps=_WARPS,
        maxnreg=_REGISTERS,
    )
