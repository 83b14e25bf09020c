"""Pool: pieces of one long range of memory, handed out by offset, first fit.

Knows nothing of what the memory is, nor of streams: whoever gets a piece again is told what was noted when it came
back. A piece goes back when its Block is collected.
"""

import sys
from collections import deque
from collections.abc import Callable
from typing import Any

ALIGNMENT = 128


class PoolFullError(MemoryError):
    """No gap is long enough; the message says how much is in use."""


class Block:
    """offset, num_bytes: where the piece is. It is the pool's again once nothing refers to the Block.

    marks: what Pool's `mark` gave for the blocks that lay here before.
    """

    __slots__ = ("_graph", "_pool", "marks", "num_bytes", "offset")

    def __init__(self, pool: "Pool", offset: int, num_bytes: int, marks: tuple[Any, ...], graph: bool):
        self._pool, self.offset, self.num_bytes, self.marks, self._graph = pool, offset, num_bytes, marks, graph

    def __del__(self):
        if not sys.is_finalizing():
            self._pool.release(self.offset, self._graph)


class Pool:
    """begin, num_bytes: the range, begin a multiple of 128. Offsets of blocks count from where begin does.

    mark: called when a block goes back, to note who may still be using it; None: nothing to note.
    """

    def __init__(self, begin: int, num_bytes: int, mark: Callable[[], Any] = lambda: None):
        self.begin, self.num_bytes = begin, num_bytes
        self._mark = mark
        self._used: dict[int, int] = {}  # offset -> end, in order of offset
        self._of_graphs: dict[int, int] = {}  # those of them that went back, but only graphs may have
        self._marks: list[tuple[int, int, Any]] = []  # disjoint ranges: offset, end, mark
        # Blocks are collected at any moment, in any thread; what went back is taken in when the pool is asked again.
        self._returned: deque[tuple[int, bool, Any]] = deque()  # offset, graph, mark

    def take(self, num_bytes: int, graph: bool = False) -> Block:
        """A block of at least num_bytes at a multiple of 128. Raises PoolFullError.

        graph: for a CUDA graph being captured, whose replays will write here for ever: when it goes back, only blocks
        of other graphs (replayed in turn) may lie here.
        """
        self._take_in()
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

    def shrink(self, block: Block, num_bytes: int) -> None:
        """The block keeps its first num_bytes. Only where nobody has used the others; not for a graph's."""
        end, old_end = block.offset + _rounded(num_bytes), self._used[block.offset]
        if end < old_end:
            self._used[block.offset], block.num_bytes = end, end - block.offset
            self._marks += [(end, old_end, mark) for mark in block.marks]  # who takes them next must wait, too

    def fits(self, num_bytes: int) -> bool:
        """Whether take(num_bytes) would find a gap."""
        self._take_in()
        return self._gap(_rounded(num_bytes)) is not None

    def release(self, offset: int, graph: bool) -> None:
        self._returned.append((offset, graph, None if graph else self._mark()))

    def _take_in(self) -> None:
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
        """Those of the range; what sticks out of it keeps its mark."""
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
