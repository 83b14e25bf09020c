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
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import NamedTuple

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
        self.rank = rank
        self.index = index  # among the rank's parts
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
    end: int = 0  # up to which it is indexed: always the start of a line
    offsets: array = field(default_factory=lambda: array("q"))  # of each line
    windows: array = field(default_factory=lambda: array("q"))  # of each line, its window number or UNKNOWN
    parts: array = field(default_factory=lambda: array("i"))  # of each line, the index of its part

    def lines(self, first: int, last: int | None = None) -> Iterator[tuple[int, bytes]]:
        """(index, line) from `first` to before `last`. OSError; FileNotFoundError when the file was rotated away."""
        num = len(self.offsets)
        last = num if last is None else last
        if first >= last:
            return
        with self.path.open("rb", buffering=_BLOCK_BYTES) as stream:
            if os.fstat(stream.fileno()).st_ino != self.inode:
                raise FileNotFoundError(f"{self.path} was rotated away")
            stream.seek(self.offsets[first])
            for k in range(first, last):
                end = self.offsets[k + 1] if k + 1 < num else self.end
                length = end - self.offsets[k]
                if length > MOST_LINE_BYTES:
                    yield k, b""
                    stream.seek(end)
                else:
                    yield k, stream.read(length)

    def find_lines(self, first_window: int, last_window: int) -> list[int]:
        """Indices of the lines of these windows."""
        windows = np.frombuffer(self.windows, dtype=np.int64)
        return np.flatnonzero((windows >= first_window) & (windows <= last_window)).tolist()


class _UnfinishedLine:
    """A line whose end has not been read yet. The bytes of one that is too long are counted, not kept."""

    def __init__(self):
        self._pieces, self._num_bytes = [], 0

    def add_piece(self, piece: bytes) -> None:
        self._num_bytes += len(piece)
        self._pieces = [*self._pieces, piece] if self._num_bytes <= MOST_LINE_BYTES else []

    def end_with(self, piece: bytes) -> tuple[bytes, int]:
        """The line, and its length with its newline. The next line begins empty."""
        self.add_piece(piece)
        line, length = b"".join(self._pieces), self._num_bytes + 1
        self._pieces, self._num_bytes = [], 0
        return line, length


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
                if file is None or status.st_size < file.end or not _begins_with(path, file.head):
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
        before, rest = len(file.offsets), _UnfinishedLine()
        with file.path.open("rb") as stream:
            stream.seek(file.end)
            while block := stream.read(_BLOCK_BYTES):
                first, *others = block.split(b"\n")
                if not others:
                    rest.add_piece(first)
                    continue
                self._index_line(file, *rest.end_with(first))
                for line in others[:-1]:
                    self._index_line(file, line, len(line) + 1)
                rest.add_piece(others[-1])
        line, length = rest.end_with(b"")
        if line.endswith(b"}"):
            self._index_line(file, line, length - 1)
        return len(file.offsets) > before

    def _index_line(self, file: LogFile, line: bytes, length: int) -> None:
        parts = self._parts.setdefault(file.rank, [])
        head = _head_of(line)
        if head is not None:
            if not parts or parts[-1].is_followed_by_another_run(head):
                parts.append(_Part(file.rank, len(parts), head))
            parts[-1].add_line(head)
        file.offsets.append(file.end)
        file.windows.append(UNKNOWN if head is None else head.window)
        file.parts.append(max(0, len(parts) - 1))
        file.end += length


def _first_bytes(path: Path) -> bytes:
    with path.open("rb") as stream:
        return stream.read(_HEAD_BYTES)


def _begins_with(path: Path, head: bytes) -> bool:
    return _first_bytes(path).startswith(head)


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
    return [_make_run(number, members) for number, members in enumerate(runs, start=1)]


def _make_run(number: int, members: list[_Part]) -> LogRun:
    num_ranks = sum((part.num_ranks for part in members), Counter())
    return LogRun(
        number=number,
        first_window=min(part.first_window for part in members),
        last_window=max(part.last_window for part in members),
        num_ranks=num_ranks.most_common(1)[0][0],
        parts=frozenset((part.rank, part.index) for part in members),
    )
