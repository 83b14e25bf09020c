"""LogFile: one file of a diagnosis log, line by line; plain, or packed by gzip. Knows no run and no record."""

import gzip
import os
import zlib
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np

_HEAD_BYTES = 256
_BLOCK_BYTES = 1 << 20
MOST_LINE_BYTES = 16 << 20  # a longer line is not one of this log
UNKNOWN = -1  # the window number of a line that has none, or one that cannot be


@dataclass(eq=False)
class LogFile:
    """One file, line by line."""

    path: Path
    rank: int
    inode: int
    head: bytes  # its first bytes: inode numbers are used again
    stored_bytes: int = 0  # of the file when it was indexed last; of a packed file, not the bytes of its lines
    problem: str = ""  # why the rest of a packed file cannot be read
    offsets: array = field(default_factory=lambda: array("q", [0]))  # of each line, and the end of the last
    windows: array = field(default_factory=lambda: array("q"))  # of each line, its window number or UNKNOWN
    parts: array = field(default_factory=lambda: array("i"))  # of each line, the index of its part

    @property
    def end(self) -> int:
        """Up to which it is indexed: always the start of a line."""
        return self.offsets[-1]

    @property
    def num_lines(self) -> int:
        return len(self.windows)

    @property
    def is_packed(self) -> bool:
        return self.path.suffix == ".gz"

    def open(self) -> BinaryIO:
        """Its lines, as bytes."""
        if self.is_packed:
            return cast(BinaryIO, gzip.open(self.path, "rb"))
        return self.path.open("rb", buffering=_BLOCK_BYTES)

    def new_lines(self) -> Iterator[tuple[bytes, int]]:
        """(line, length) of each line that is not indexed yet. A packed file that is damaged gives what it has."""
        with self.open() as stream:
            stream.seek(self.end)
            try:
                yield from _whole_lines(stream)
            except (EOFError, zlib.error, gzip.BadGzipFile) as error:
                self.problem = f"cannot be unpacked further: {error}"

    @property
    def num_cut_off(self) -> int:
        """Bytes of an unfinished line at its end."""
        return 0 if self.is_packed or not self.path.exists() else max(0, self.path.stat().st_size - self.end)

    def read_lines(self, indices: Iterable[int]) -> Iterator[tuple[int, bytes]]:
        """(index, line) of each, a line that is too long as b"". FileNotFoundError when the file was rotated away."""
        with self.open() as stream:
            if os.fstat(stream.fileno()).st_ino != self.inode:
                raise FileNotFoundError(f"{self.path} was rotated away")
            at = 0
            for k in indices:
                start, end = self.offsets[k], self.offsets[k + 1]
                if end - start > MOST_LINE_BYTES:
                    yield k, b""
                    continue
                if at != start:
                    stream.seek(start)
                yield k, stream.read(end - start)
                at = end

    def find_lines(self, first_window: int, last_window: int) -> list[int]:
        """Indices of the lines of these windows."""
        windows = np.frombuffer(self.windows, dtype=np.int64)
        return np.flatnonzero((windows >= first_window) & (windows <= last_window)).tolist()


def first_bytes(path: Path) -> bytes:
    """As they are stored."""
    with path.open("rb") as stream:
        return stream.read(_HEAD_BYTES)


def _whole_lines(stream: BinaryIO) -> Iterator[tuple[bytes, int]]:
    """(line, length) of each; a line that is too long comes as b""."""
    while piece := stream.readline(MOST_LINE_BYTES + 1):
        line, length = piece, len(piece)
        while len(piece) > MOST_LINE_BYTES and not piece.endswith(b"\n"):
            line, piece = b"", stream.readline(MOST_LINE_BYTES + 1)
            length += len(piece)
        if not piece.endswith(b"\n") and not line.endswith(b"}"):
            return
        yield line, length
