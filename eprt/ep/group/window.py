"""SharedWindow: symmetric memory of the ranks of one node."""

from collections.abc import Callable

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
