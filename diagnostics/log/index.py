"""LogIndex: where the lines of each window are in a log directory. Knows the first fields of a line, and no others.

It keeps up with a directory that a running job writes to: `refresh` reads only what was appended, and recognises a
rotated file by its inode.

A job that is started again with the same directory may begin anew with window 0. The index keeps such runs apart: in
each rank's file a run ends where window numbers go back and time does not; parts of different ranks that overlap in
time are one run.
"""

import os
import re
import stat
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from .events import FILE_NAME, MOST, MOST_RANKS, MOST_SECONDS

_HEAD = re.compile(
    rb'\{"schema":"[^"]*","window":(\d{1,15}),"t_start":([0-9.eE+-]{1,30}),"t_end":[0-9.eE+-]{1,30},"rank":\d{1,9},'
    rb'"num_ranks":(\d{1,9})'
)
_FIELDS = tuple(
    re.compile(rb'"%s"\s*:\s*([0-9][0-9.eE+-]{0,30})\s*[,}]' % name) for name in (b"window", b"t_start", b"num_ranks")
)
_HEAD_BYTES = 256
_BLOCK_BYTES = 1 << 20
MOST_LINE_BYTES = 16 << 20  # a longer line is not one of this log
UNKNOWN = -1  # the window number of a line that has none


class _Head(NamedTuple):
    """The first fields of a line."""

    window: int
    start_s: float  # Unix time
    num_ranks: int


class _Part:
    """Consecutive lines of one rank that belong to one run."""

    def __init__(self, rank: int, index: int, first: _Head):
        self.rank, self.index = rank, index  # among the rank's parts
        self.first_s = self.last_s = first.start_s
        self.first_window = self.last_window = first.window
        self.num_ranks: Counter[int] = Counter()  # number of ranks -> lines that have it

    def is_followed_by_another_run(self, head: _Head) -> bool:
        return head.window <= self.last_window and head.start_s > self.last_s

    def add_line(self, head: _Head) -> None:
        self.first_window, self.last_window = min(self.first_window, head.window), max(self.last_window, head.window)
        self.last_s = max(self.last_s, head.start_s)
        self.num_ranks[head.num_ranks] += 1


@dataclass(frozen=True, eq=False)
class LogRun:
    """One start of a job."""

    number: int  # counts from 1
    first_window: int
    last_window: int
    num_ranks: int  # as most of its lines have it
    parts: frozenset[tuple[int, int]]  # (rank, index of its part)


@dataclass(eq=False)
class LogFile:
    """One file, line by line."""

    path: Path
    rank: int
    inode: int
    head: bytes  # its first bytes: inode numbers are used again
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

    def read_lines(self, indices: Iterable[int]) -> Iterator[tuple[int, bytes]]:
        """(index, line) of each, a line that is too long as b"". FileNotFoundError when the file was rotated away."""
        with self.path.open("rb", buffering=_BLOCK_BYTES) as stream:
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


class LogIndex:
    """The files of a directory and the runs in them."""

    def __init__(self, directory: str | Path):
        self.directory = Path(directory)
        self._files: dict[int, LogFile] = {}  # by inode
        self._parts: dict[int, list[_Part]] = {}  # by rank
        self.runs: list[LogRun] = []  # the oldest first

    @property
    def files(self) -> list[LogFile]:
        """The oldest of each rank first."""
        return list(self._files.values())

    @property
    def num_bytes(self) -> int:
        return sum(file.end for file in self._files.values())

    def refresh(self) -> bool:
        """Whether there was anything new. OSError when the directory cannot be read."""
        found = sorted(
            (int(match[1]), -int(match[2] or 0), path)  # the oldest of a rank first: .log.1, then .log
            for path in self.directory.iterdir()
            if (match := FILE_NAME.match(path.name))
        )
        present: dict[int, LogFile] = {}
        grown = False
        for rank, _, path in found:
            try:
                status = path.stat()
                if not stat.S_ISREG(status.st_mode):  # a pipe would never end
                    raise ValueError(f"{path} is not a regular file")
                file = self._files.get(status.st_ino)
                if file is None or status.st_size < file.end or not _first_bytes(path).startswith(file.head):
                    file = LogFile(path, rank, status.st_ino, _first_bytes(path))  # new, or rewritten
                file.path = path
                present[status.st_ino] = file
                grown |= self._index_file(file, status.st_size)
            except FileNotFoundError:  # rotated this very moment; the next refresh finds it
                continue
        self._files = present
        if grown:
            self.runs = _find_runs(self._parts)
        return grown

    def _index_file(self, file: LogFile, size: int) -> bool:
        """Indexes every whole line, and what follows the last newline when it is a whole line too."""
        if size <= file.end:
            return False
        num_before = file.num_lines
        with file.path.open("rb", buffering=_BLOCK_BYTES) as stream:
            stream.seek(file.end)
            for line, length in _whole_lines(stream):
                self._index_line(file, line, length)
        return file.num_lines > num_before

    def _index_line(self, file: LogFile, line: bytes, length: int) -> None:
        parts = self._parts.setdefault(file.rank, [])
        head = _head_of(line)
        if head is not None:
            if not parts or parts[-1].is_followed_by_another_run(head):
                parts.append(_Part(file.rank, len(parts), head))
            parts[-1].add_line(head)
        file.offsets.append(file.end + length)
        file.windows.append(UNKNOWN if head is None else head.window)
        file.parts.append(max(0, len(parts) - 1))


def _first_bytes(path: Path) -> bytes:
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


def _head_of(line: bytes) -> _Head | None:
    """None where the fields are missing or their numbers impossible."""
    match = _HEAD.match(line)
    fields = match.groups() if match else [found[1] for pattern in _FIELDS if (found := pattern.search(line))]
    try:
        head = _Head(int(fields[0]), float(fields[1]), int(fields[2]))
    except (ValueError, IndexError):
        return None
    possible = head.window <= MOST and head.start_s <= MOST_SECONDS and head.num_ranks <= MOST_RANKS
    return head if possible else None


def _find_runs(parts_of_rank: dict[int, list[_Part]]) -> list[LogRun]:
    """Parts that overlap in time are one run, except two of the same rank."""
    parts = sorted(chain(*parts_of_rank.values()), key=lambda part: (part.first_s, part.rank, part.index))
    runs: list[list[_Part]] = []
    end_s = -np.inf
    for part in parts:
        if not runs or part.first_s > end_s or any(part.rank == other.rank for other in runs[-1]):
            runs.append([])
            end_s = -np.inf
        runs[-1].append(part)
        end_s = max(end_s, part.last_s)
    return [
        LogRun(
            number=number,
            first_window=min(part.first_window for part in members),
            last_window=max(part.last_window for part in members),
            num_ranks=sum((part.num_ranks for part in members), Counter()).most_common(1)[0][0],
            parts=frozenset((part.rank, part.index) for part in members),
        )
        for number, members in enumerate(runs, start=1)
    ]
