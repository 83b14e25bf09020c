"""A checksum of memory that can be computed in any order: each word is mixed with its place, and all are added.

A change of one word always changes the sum; of several, but for one case in 2^64.
"""

import numpy as np
from torch import Tensor

# Odd, below 2^63, and otherwise of no account.
PLACE, FIRST, SECOND = 0x1E3779B97F4A7C15, 0x2545F4914F6CDD1D, 0x5851F42D4C957F2D
SHIFT = 29


def add_checksum(bytes_B: Tensor, total: Tensor, first: int = 0) -> None:
    """Adds that of a piece of memory to total (int64 [1]), modulo 2^64.

    bytes_B: uint8, contiguous. first: place of its first word, where several pieces make one sum. A word has four bytes
    where address and length allow it, else one.
    """
    words = bytes_B.numpy().view(np.uint32 if word_bytes(bytes_B) == 4 else np.uint8).astype(np.uint64)
    place = np.arange(first, first + len(words), dtype=np.uint64)
    mixed = (words ^ (place * np.uint64(PLACE))) * np.uint64(FIRST)
    mixed = (mixed ^ (mixed >> np.uint64(SHIFT))) * np.uint64(SECOND)
    total.numpy()[:] += mixed.sum(dtype=np.uint64).astype(np.int64)


def word_bytes(bytes_B: Tensor) -> int:
    return 4 if bytes_B.data_ptr() % 4 == 0 and len(bytes_B) % 4 == 0 else 1
