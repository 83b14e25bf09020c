"""A checksum of memory that can be computed in any order: the sum of all words, each mixed with its place.

A change of one word always changes the sum; a change of several leaves it unchanged in one case of 2^64.
"""

import numpy as np
from torch import Tensor

# Arbitrary, but odd and below 2^63.
PLACE, FIRST, SECOND = 0x1E3779B97F4A7C15, 0x2545F4914F6CDD1D, 0x5851F42D4C957F2D
SHIFT = 29
WORDS = (4, 1)  # bytes of a word
WIDE_WORDS = (8, *WORDS)  # of a GPU's pages: half the arithmetic


def add_checksum(bytes_B: Tensor, total: Tensor, first: int = 0, sizes: tuple[int, ...] = WORDS) -> None:
    """Adds the checksum of a piece of memory to total (int64 [1]), modulo 2^64.

    bytes_B: uint8, contiguous.
    first: the place of its first word, when several pieces make one sum.
    sizes: of a word, as word_bytes() has them.
    """
    words = bytes_B.numpy().view(f"u{word_bytes(bytes_B, sizes)}").astype(np.uint64)
    place = np.arange(first, first + len(words), dtype=np.uint64)
    mixed = (words ^ (place * np.uint64(PLACE))) * np.uint64(FIRST)
    mixed = (mixed ^ (mixed >> np.uint64(SHIFT))) * np.uint64(SECOND)
    total.numpy()[:] += mixed.sum(dtype=np.uint64).astype(np.int64)


def word_bytes(bytes_B: Tensor, sizes: tuple[int, ...] = WORDS) -> int:
    """Bytes of a word: the first of these sizes of which address and length (the last one) are multiples."""
    return next(size for size in sizes if bytes_B.data_ptr() % size == 0 and bytes_B.shape[-1] % size == 0)
