"""HostBoard: what the ranks of one host tell each other while they set up, and the memory that they share.

One memfd, which the launcher makes and every rank inherits. Each rank's values stay on it, so a process that takes the
place of a dead rank reads what the others said without their help, and maps the same memory as its predecessor. Nothing
has a name in a file system: all of it goes with the last process. Knows nothing of what the values mean.

Layout, all sparse: words (one line per rank) | index (one word per rank and value) | heap of each rank | arena of
windows. An index word is offset << 32 | length of a record in the rank's heap, 0 while there is none; it is written
after the record. A record is a CRC-32 and the value.
"""

import mmap
import os
import struct
import zlib

import numpy as np

from eprt.ep.group import life_lock

_MAX_VALUES = 1 << 16  # of one rank
_HEAP_BYTES = 1 << 30  # of one rank
_ARENA_BYTES = 1 << 42
_ALIGNMENT = 2 << 20  # a huge page
_CRC = struct.Struct("<I")
_LINE_WORDS = 8
# Words of a rank's line. The last ones are a LifeLock.
_HEAP_USED, _ENDED, _LIFE = 0, 1, 2


class HostBoard:
    """One process's view of the board.

    Args:
        fd: descriptor of the memfd; the board owns it.
        size: number of ranks.
    """

    def __init__(self, fd: int, size: int):
        self.fd, self.size = fd, size
        num_lines = size * _LINE_WORDS
        num_words = num_lines + size * _MAX_VALUES
        self._heaps_at = _aligned(8 * num_words)
        self.arena_at = _aligned(self._heaps_at + size * _HEAP_BYTES)
        words = np.frombuffer(mmap.mmap(fd, self._heaps_at), dtype=np.int64)
        self._line_RW = words[:num_lines].reshape(size, _LINE_WORDS)
        self._life_R = self._line_RW.view(np.int32)[:, 2 * _LIFE]
        self._index_RV = words[num_lines:num_words].reshape(size, _MAX_VALUES)

    @classmethod
    def create(cls, size: int) -> "HostBoard":
        fd = os.memfd_create("eprt-board")
        os.ftruncate(fd, _aligned(8 * size * (_LINE_WORDS + _MAX_VALUES)) + size * _HEAP_BYTES + _ARENA_BYTES)
        return cls(fd, size)

    # -- values --

    def write_value(self, rank: int, index: int, value: bytes) -> None:
        """Writes a rank's value number `index`, in place of what its predecessor wrote. Only that rank calls it."""
        if index >= _MAX_VALUES:
            raise RuntimeError(f"rank {rank} makes more than {_MAX_VALUES} set-up calls")
        if self.read_value(rank, index) == value:
            return
        record = _CRC.pack(zlib.crc32(value)) + value
        at = int(self._line_RW[rank, _HEAP_USED])
        if at + len(record) > _HEAP_BYTES:
            raise RuntimeError(f"the set-up values of rank {rank} need more than {_HEAP_BYTES} B; restart the server")
        os.pwrite(self.fd, record, self._heaps_at + rank * _HEAP_BYTES + at)
        self._line_RW[rank, _HEAP_USED] = at + len(record)
        self._index_RV[rank, index] = at << 32 | len(record)

    def read_value(self, rank: int, index: int) -> bytes | None:
        """A rank's latest value number `index`; None where it has written none yet."""
        word = int(self._index_RV[rank, index])
        if not word:
            return None
        record = os.pread(self.fd, word & 0xFFFFFFFF, self._heaps_at + rank * _HEAP_BYTES + (word >> 32))
        value = record[_CRC.size :]
        # A CPU may show the word before the record: then the caller asks again.
        return value if _CRC.unpack_from(record)[0] == zlib.crc32(value) else None

    # -- processes --

    def mark_ended(self, rank: int, ended: bool) -> None:
        """Whether the rank's process has ended; written by the launcher."""
        self._line_RW[rank, _ENDED] = ended

    def has_ended(self, rank: int) -> bool:
        return bool(self._line_RW[rank, _ENDED])

    def hold_life(self, rank: int) -> None:
        """From now on died() tells of the end of this process, the rank's. Its main thread calls it."""
        life_lock.hold(self._life(rank))

    def release_life(self, rank: int) -> None:
        """Undoes hold_life()."""
        life_lock.release(self._life(rank))

    def _life(self, rank: int) -> np.ndarray:
        return self._line_RW[rank, _LIFE:].view(np.uint8)

    def died(self) -> np.ndarray:
        """bool [ranks]: whose process is known to have been killed, long before has_ended() says so."""
        return life_lock.died(self._life_R)

    # -- memory --

    def map_window(self, at: int, num_bytes: list[int]) -> tuple[list[np.ndarray], int]:
        """Segments of these sizes, in a row from byte `at` of the arena; and where the next window begins."""
        starts = [0]
        for size in num_bytes:
            starts.append(starts[-1] + -(-size // mmap.PAGESIZE) * mmap.PAGESIZE)
        if at + starts[-1] > _ARENA_BYTES:
            raise MemoryError(f"windows of {at + starts[-1]} B: a board has room for {_ARENA_BYTES} B")
        memory = mmap.mmap(self.fd, max(starts[-1], mmap.PAGESIZE), offset=self.arena_at + at)
        window = np.frombuffer(memory, dtype=np.uint8)
        segments = [window[start : start + size] for start, size in zip(starts, num_bytes)]
        return segments, _aligned(at + starts[-1])

    def clear_window(self, segment: np.ndarray, at: int) -> None:
        """Gives the pages of a segment back; they read as zero in every process. at: its first byte in the arena."""
        num_bytes = -(-segment.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        if num_bytes:
            with mmap.mmap(self.fd, num_bytes, offset=self.arena_at + at) as memory:
                memory.madvise(mmap.MADV_REMOVE)

    def close(self) -> None:
        """Gives the descriptor back. Memory that is mapped stays with its views."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
