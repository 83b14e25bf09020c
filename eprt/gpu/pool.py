"""Pool: pieces of one long range of memory, handed out by offset, first fit.

Knows nothing of what the memory is. A piece goes back when its Block is collected.
"""

ALIGNMENT = 128


class PoolFullError(MemoryError):
    """No gap is long enough; the message says how much is in use."""


class Block:
    """offset, num_bytes: where the piece is. It is the pool's again once nothing refers to the Block."""

    __slots__ = ("_pool", "num_bytes", "offset")

    def __init__(self, pool: "Pool", offset: int, num_bytes: int):
        self._pool, self.offset, self.num_bytes = pool, offset, num_bytes

    def __del__(self):
        self._pool.release(self.offset)


class Pool:
    """begin, num_bytes: the range, begin a multiple of 128. Offsets of blocks count from where begin does."""

    def __init__(self, begin: int, num_bytes: int):
        self.begin, self.num_bytes = begin, num_bytes
        self._used: dict[int, int] = {}  # offset -> end, in order of offset

    def take(self, num_bytes: int) -> Block:
        """A block of at least num_bytes at a multiple of 128. Raises PoolFullError."""
        size = max(-(-num_bytes // ALIGNMENT), 1) * ALIGNMENT
        offset = self.begin
        for start, end in self._used.items():
            if start - offset >= size:
                break
            offset = end
        if offset + size > self.begin + self.num_bytes:
            used = sum(end - start for start, end in self._used.items())
            raise PoolFullError(
                f"{size} B do not fit: {used} of {self.num_bytes} B are in use, by {len(self._used)} blocks"
            )
        self._used[offset] = offset + size
        self._used = dict(sorted(self._used.items()))
        return Block(self, offset, size)

    def release(self, offset: int) -> None:
        self._used.pop(offset, None)
