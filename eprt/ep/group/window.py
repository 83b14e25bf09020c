"""SharedWindow: symmetric memory of the ranks of one node."""

import os
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

PAGE = 4096


class SharedWindow:
    """Memory to which every rank of the node contributes a segment, and which all of them read and write.

    Pages take memory only once they are touched; fresh ones read as zero. No view may be used after close(), nor after
    the group's.

    segments: one uint8 view per local rank, in local_ranks order, 4096-byte aligned.
    free: gives the memory back; None where it goes with its last view.
    """

    def __init__(self, segments: list[np.ndarray], free: Callable[[], None] | None = None):
        self.segments = segments
        self._free = free

    def close(self) -> None:
        """Gives the memory back. Collective inside the node while its ranks live; never hangs when some do not."""
        free, self._free, self.segments = self._free, None, []
        if free is not None:
            free()


def page_aligned(raw: np.ndarray, num_bytes: int) -> np.ndarray:
    """num_bytes of a uint8 array that is a page longer, starting at a page."""
    start = -raw.ctypes.data % PAGE
    return raw[start : start + num_bytes]


def private_window(num_bytes: int) -> SharedWindow:
    """The window of a node with one rank."""
    return SharedWindow([page_aligned(np.zeros(num_bytes + PAGE, dtype=np.uint8), num_bytes)])


@dataclass(frozen=True, eq=False)
class AdjacentMemory:
    """Equal parts of memory, one of each rank, in a row, which all ranks of the host read and write. Fresh ones read as
    zero. Each rank has them at addresses of its own, but everywhere one follows the other."""

    bytes_RB: np.ndarray  # uint8 [ranks, bytes of each], contiguous
    fd: int  # the caller's, of the file that the memory is of
    offset: int  # in the file, of rank 0's part

    def close_file(self) -> None:
        """The memory stays with its views."""
        os.close(self.fd)
