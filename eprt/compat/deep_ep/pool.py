"""MemoryPool: allocates blocks of one range of memory by offset, first fit.

A block returns to the pool when its Block object is collected. A mark made at that moment is passed to the next owner
of the memory. Knows nothing of what the memory is, nor of streams.
"""

import sys
from collections import deque
from collections.abc import Callable
from typing import Any

ALIGNMENT = 128


class PoolFullError(MemoryError):
    """No gap is long enough; the message tells how much is in use."""


class Block:
    """A block of a pool, which returns to the pool when nothing refers to this object.

    marks: of the earlier blocks in this memory, made when they returned.
    graph: whether it belongs to a CUDA graph.
    """

    __slots__ = ("_graph", "_pool", "marks", "num_bytes", "offset")

    def __init__(self, pool: "MemoryPool", offset: int, num_bytes: int, marks: tuple[Any, ...], graph: bool):
        self._pool, self.offset, self.num_bytes, self.marks, self._graph = pool, offset, num_bytes, marks, graph

    def __del__(self):
        if not sys.is_finalizing():
            self._pool.release_block(self.offset, self._graph)


class MemoryPool:
    """Allocates blocks of a range of memory.

    begin: where the range begins, a multiple of 128. Offsets of blocks count from the same origin.
    mark: called when a block returns; its result tells the next owner who may still use the memory (None: nobody).
    """

    def __init__(self, begin: int, num_bytes: int, mark: Callable[[], Any] = lambda: None):
        self.begin, self.num_bytes = begin, num_bytes
        self._mark = mark
        self._used: dict[int, int] = {}  # offset -> end, in order of offset
        self._of_graphs: dict[int, int] = {}  # used blocks that returned from graphs; only other graphs may have them
        self._marks: list[tuple[int, int, Any]] = []  # disjoint ranges: offset, end, mark
        # Blocks are collected at any moment, in any thread; the pool processes them when it is used next.
        self._returned: deque[tuple[int, bool, Any]] = deque()  # offset, graph, mark

    def take_block(self, num_bytes: int, graph: bool = False) -> Block:
        """A block of at least num_bytes at a multiple of 128. PoolFullError if none is free.

        graph: for a CUDA graph that is being captured. Its replays write here forever, so after its return only other
        graphs, which are replayed in turn, may have the memory.
        """
        self._collect_returned()
        size = _rounded(num_bytes)
        if graph:
            for offset, end in self._of_graphs.items():
                if end - offset >= size:
                    del self._of_graphs[offset]
                    return Block(self, offset, end - offset, (), True)
        offset = self._gap(size)
        if offset is None:
            used = sum(end - start for start, end in self._used.items())
            raise PoolFullError(
                f"{size} B do not fit: {used} of {self.num_bytes} B are in use, by {len(self._used)} blocks"
            )
        self._used[offset] = offset + size
        self._used = dict(sorted(self._used.items()))
        return Block(self, offset, size, self._take_marks(offset, offset + size), graph)

    def shrink_block(self, block: Block, num_bytes: int) -> None:
        """The block keeps its first num_bytes. The rest must be unused so far; not for blocks of graphs."""
        end, old_end = block.offset + _rounded(num_bytes), self._used[block.offset]
        if end < old_end:
            self._used[block.offset], block.num_bytes = end, end - block.offset
            self._marks += [(end, old_end, mark) for mark in block.marks]  # for the next owner of the rest

    def fits(self, num_bytes: int) -> bool:
        """Whether take_block(num_bytes) would find a gap."""
        self._collect_returned()
        return self._gap(_rounded(num_bytes)) is not None

    def release_block(self, offset: int, graph: bool) -> None:
        self._returned.append((offset, graph, None if graph else self._mark()))

    def _collect_returned(self) -> None:
        while self._returned:
            offset, graph, mark = self._returned.popleft()
            if graph:
                self._of_graphs[offset] = self._used[offset]
                continue
            end = self._used.pop(offset)
            if mark is not None:
                self._marks.append((offset, end, mark))

    def _gap(self, size: int) -> int | None:
        offset = self.begin
        for start, end in self._used.items():
            if start - offset >= size:
                return offset
            offset = end
        return offset if offset + size <= self.begin + self.num_bytes else None

    def _take_marks(self, offset: int, end: int) -> tuple[Any, ...]:
        """The marks of the range; memory outside it keeps its marks."""
        inside, left = [], []
        for first, last, mark in self._marks:
            if last <= offset or end <= first:
                left.append((first, last, mark))
                continue
            inside.append(mark)
            left += [(a, b, mark) for a, b in ((first, offset), (end, last)) if a < b]
        self._marks = left
        return tuple(inside)


def _rounded(num_bytes: int) -> int:
    return max(-(-num_bytes // ALIGNMENT), 1) * ALIGNMENT
