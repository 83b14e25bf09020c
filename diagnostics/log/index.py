"""LogIndex: where the lines of each window are in a log directory. Knows the first fields of a line, and no others.

It keeps up with a directory that a running job writes to: `refresh` reads only what was appended, and recognises a
rotated file by its inode.

A job that is started again with the same directory may begin anew with window 0. The index keeps such runs apart: in
each rank's file a run ends where window numbers go back and time does not; parts of different ranks that overlap in
time are one run. Where all ranks have as many parts with the same windows, their order tells instead: clocks differ.
"""

import re
import stat
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np

from .events import FILE_NAME, MOST, MOST_RANKS, MOST_SECONDS
from .files import UNKNOWN, LogFile, first_bytes

_HEAD = re.compile(
    rb'\{"schema":"[^"]*","window":(\d{1,15}),"t_start":([0-9.eE+-]{1,30}),"t_end":[0-9.eE+-]{1,30},"rank":\d{1,9},'
    rb'"num_ranks":(\d{1,9})'
)
_FIELDS = tuple(
    re.compile(rb'"%s"\s*:\s*([0-9][0-9.eE+-]{0,30})\s*[,}]' % name) for name in (b"window", b"t_start", b"num_ranks")
)
_MOST_JUMP = 10**6  # windows from one line to the next; a number further off is no window's
_TIMED_WINDOWS = 8  # of a part, by which clocks are compared
_MOST_APART_S = 60.0  # more between ranks' times of the same window is a clock that is off


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
        self.start_s: dict[int, float] = {}  # of its first windows

    def is_far_from(self, head: _Head) -> bool:
        return abs(head.window - self.last_window) > _MOST_JUMP

    def is_followed_by_another_run(self, head: _Head) -> bool:
        return head.window <= self.last_window and head.start_s > self.last_s

    def add_line(self, head: _Head) -> None:
        self.first_window, self.last_window = min(self.first_window, head.window), max(self.last_window, head.window)
        self.last_s = max(self.last_s, head.start_s)
        self.num_ranks[head.num_ranks] += 1
        if len(self.start_s) < _TIMED_WINDOWS:
            self.start_s.setdefault(head.window, head.start_s)


@dataclass(frozen=True, eq=False)
class LogRun:
    """One start of a job."""

    number: int  # counts from 1
    first_window: int
    last_window: int
    num_ranks: int  # as most of its lines have it
    parts: frozenset[tuple[int, int]]  # (rank, index of its part)
    ahead_s: Mapping[int, float] = field(default_factory=dict)  # of ranks whose clock differs from the first rank's


class LogIndex:
    """The files of a directory and the runs in them."""

    def __init__(self, directory: str | Path):
        self.directory = Path(directory)
        self._files: dict[int, LogFile] = {}  # by inode
        self._parts: dict[int, list[_Part]] = {}  # by rank
        self.runs: list[LogRun] = []  # the oldest first
        self.refused: list[Path] = []  # what has a log file's name and is no file

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
            # The oldest of a rank first: .log.1, then .log; a packed file before one that is still written.
            (int(match[1]), -int(match[2] or 0), not match[3], path)
            for path in self.directory.iterdir()
            if (match := FILE_NAME.match(path.name))
        )
        present: dict[int, LogFile] = {}
        grown = False
        self.refused = []
        for rank, _, _, path in found:
            try:
                status = path.stat()
                if not stat.S_ISREG(status.st_mode):  # a pipe would never end
                    self.refused.append(path)
                    continue
                file = self._files.get(status.st_ino)
                if file is None or status.st_size < file.stored_bytes or not first_bytes(path).startswith(file.head):
                    file = LogFile(path, rank, status.st_ino, first_bytes(path))  # new, or rewritten
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
        if size <= (file.stored_bytes if file.is_packed else file.end):
            return False
        num_before = file.num_lines
        for line, length in file.new_lines():
            self._index_line(file, line, length)
        file.stored_bytes = size
        return file.num_lines > num_before

    def _index_line(self, file: LogFile, line: bytes, length: int) -> None:
        parts = self._parts.setdefault(file.rank, [])
        head = _head_of(line)
        if head is not None and parts and parts[-1].is_far_from(head):
            if parts[-1].num_ranks.total() == 1 and head.window < parts[-1].last_window and file.num_lines:
                parts.pop()  # the line before was alone with its number
                file.windows[-1] = UNKNOWN
            else:
                head = None
        if head is not None:
            if not parts or parts[-1].is_followed_by_another_run(head):
                parts.append(_Part(file.rank, len(parts), head))
            parts[-1].add_line(head)
        file.offsets.append(file.end + length)
        file.windows.append(UNKNOWN if head is None else head.window)
        file.parts.append(max(0, len(parts) - 1))


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
    """The runs, by time or, where they are the same for all ranks, by the order of their parts."""
    runs = _runs_in_order(parts_of_rank) or _runs_by_time(parts_of_rank)
    return [
        LogRun(
            number=number,
            first_window=min(part.first_window for part in members),
            last_window=max(part.last_window for part in members),
            num_ranks=_num_ranks_of(members),
            parts=frozenset((part.rank, part.index) for part in members),
            ahead_s=_ahead_s(members),
        )
        for number, members in enumerate(runs, start=1)
    ]


def _num_ranks_of(members: list[_Part]) -> int:
    return sum((part.num_ranks for part in members), Counter()).most_common(1)[0][0]


def _runs_in_order(parts_of_rank: dict[int, list[_Part]]) -> list[list[_Part]] | None:
    """None unless all ranks have as many parts, whose windows overlap and that tell of as many ranks."""
    num_parts = {len(parts) for parts in parts_of_rank.values()}
    if len(num_parts) != 1:
        return None
    runs = [list(members) for members in zip(*parts_of_rank.values())]
    for members in runs:
        first, last = max(part.first_window for part in members), min(part.last_window for part in members)
        if first > last or len({_num_ranks_of([part]) for part in members}) > 1:
            return None
    return runs


def _ahead_s(members: list[_Part]) -> dict[int, float]:
    first = min(members, key=lambda part: part.rank)
    ahead_s = {}
    for part in members:
        apart = [part.start_s[window] - first.start_s[window] for window in part.start_s if window in first.start_s]
        if apart and abs(median(apart)) > _MOST_APART_S:
            ahead_s[part.rank] = median(apart)
    return ahead_s


def _runs_by_time(parts_of_rank: dict[int, list[_Part]]) -> list[list[_Part]]:
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
    return runs
