"""The reader `memory`: caches of CPU ranks of one host, which lie in memfds that the other processes map.

A mapping outlives the process whose memory it was: a copy that was begun ends, and is whole.
"""

import mmap
from collections.abc import Sequence

import numpy as np

from eprt.kv.reader import CachePart, PageReader, PageSource


class MemoryReader(PageReader):
    """Maps the memory when it is made."""

    def __init__(self, source: PageSource):
        self._bytes_LPB = [_map(source.pid, part) for part in source.parts]

    def read_pages(self, from_pages: Sequence[int], into_LPB: Sequence[np.ndarray], to_pages: Sequence[int]) -> None:
        for begin, end in _runs(from_pages, to_pages):
            there, here, num = from_pages[begin], to_pages[begin], end - begin
            for mine_LPB, theirs_LPB in zip(into_LPB, self._bytes_LPB, strict=True):
                mine_LPB[:, here : here + num] = theirs_LPB[:, there : there + num]

    def close(self) -> None:
        self._bytes_LPB.clear()  # unmaps the memory, which nobody else refers to


def _map(pid: int, part: CachePart) -> np.ndarray:
    with open(f"/proc/{pid}/fd/{part.fd}", "rb") as file:
        memory = mmap.mmap(file.fileno(), int(np.prod(part.shape)), prot=mmap.PROT_READ)
    return np.frombuffer(memory, dtype=np.uint8).reshape(part.shape)


def _runs(from_pages: Sequence[int], to_pages: Sequence[int]) -> list[tuple[int, int]]:
    """(begin, end) of stretches in which pages follow each other on both sides: one copy each."""
    starts = [
        i
        for i in range(len(from_pages))
        if i == 0 or from_pages[i] != from_pages[i - 1] + 1 or to_pages[i] != to_pages[i - 1] + 1
    ]
    return list(zip(starts, [*starts[1:], len(from_pages)]))
