"""The reader `memory`: caches of CPU ranks of one host, which lie in memfds that the other processes map.

A mapping outlives the process whose memory it was: a copy that was begun ends, and is whole.
"""

import mmap
from collections.abc import Sequence

import numpy as np
import torch

from eprt.kv.reader import CachePart, PageReader, PageSource, check_pages
from eprt.ops import native


class MemoryReader(PageReader):
    """Maps the memory when it is made."""

    def __init__(self, source: PageSource):
        self._source = source
        self._bytes_LPB = [_map(source.pid, part) for part in source.parts]
        self._ops = native.load()

    def read_pages(self, from_pages: Sequence[int], into_LPB: Sequence[np.ndarray], to_pages: Sequence[int]) -> None:
        check_pages(self._source, from_pages, into_LPB, to_pages)
        there, here = (torch.tensor(pages, dtype=torch.int64) for pages in (from_pages, to_pages))
        for mine_LPB, theirs_LPB in zip(into_LPB, self._bytes_LPB, strict=True):
            num_layers, _, num_bytes = mine_LPB.shape
            source = theirs_LPB.ctypes.data, theirs_LPB.strides[0], there
            self._ops.kv_copy_pages(*source, mine_LPB.ctypes.data, mine_LPB.strides[0], here, num_layers, num_bytes)

    def close(self) -> None:
        self._bytes_LPB.clear()  # unmaps the memory, which nobody else refers to


def _map(pid: int, part: CachePart) -> np.ndarray:
    with open(f"/proc/{pid}/fd/{part.fd}", "rb") as file:
        memory = mmap.mmap(file.fileno(), int(np.prod(part.shape)), prot=mmap.PROT_READ, offset=part.offset)
    return np.frombuffer(memory, dtype=np.uint8).reshape(part.shape)
