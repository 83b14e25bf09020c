"""LogIndex: where the lines of each window lie in a log directory, found without reading them in full.

Keeps up with a directory that a running job writes: `refresh` looks only at what was appended, and a file that was
rotated away is known again by its inode. Lines that cannot be used are left out; `analyse` reports them.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .events import WindowRecord

_FILE_NAME = re.compile(r"diagnose_rank(\d+)\.log(?:\.(\d+))?$")
_WINDOW = re.compile(rb'"window"\s*:\s*(\d+)')
_HEAD_BYTES = 200  # of a line, within which its window number stands
_BLOCK_BYTES = 1 << 20


@dataclass
class _File:
    path: Path
    rank: int
    offset: int = 0  # up to which it is indexed: always the start of a line


class LogIndex:
    """shape: num_ranks and node_of_rank of the first usable line read; lines of another shape are left out."""

    def __init__(self, directory: str | Path):
        self.directory = Path(directory)
        self._files: dict[int, _File] = {}  # by inode
        self._places: dict[int, list[tuple[int, int, int]]] = {}  # window -> inode, offset, bytes
        self.shape: tuple[int, tuple[int, ...]] | None = None

    def windows(self) -> list[int]:
        return sorted(self._places)

    def num_lines(self, window: int) -> int:
        return len(self._places.get(window, ()))

    def refresh(self) -> set[int]:
        """Windows with new lines. OSError when the directory cannot be read."""
        found = sorted(
            (int(match[1]), -int(match[2] or 0), path)  # the oldest of a rank first: .log.1, then .log
            for path in self.directory.iterdir()
            if (match := _FILE_NAME.match(path.name))
        )
        new: set[int] = set()
        present = set()
        for rank, _, path in found:
            try:
                inode = path.stat().st_ino
                file = self._files.setdefault(inode, _File(path, rank))
                file.path = path
                present.add(inode)
                new.update(self._index(inode, file))
            except FileNotFoundError:  # rotated this very moment; the next refresh finds it
                continue
        for inode in set(self._files) - present:
            self._forget(inode)
        return new

    def _forget(self, inode: int) -> None:
        del self._files[inode]
        for window, places in list(self._places.items()):
            self._places[window] = [place for place in places if place[0] != inode]
            if not self._places[window]:
                del self._places[window]

    def _index(self, inode: int, file: _File) -> Iterator[int]:
        size = file.path.stat().st_size
        if size < file.offset:  # cut short, or written anew
            self._forget(inode)
            file = self._files[inode] = _File(file.path, file.rank)
        if size == file.offset:
            return
        with file.path.open("rb") as stream:
            stream.seek(file.offset)
            rest = b""
            while block := stream.read(_BLOCK_BYTES):
                *lines, rest = (rest + block).split(b"\n")
                for line in lines:
                    match = _WINDOW.search(line, 0, _HEAD_BYTES)
                    if match:
                        self._places.setdefault(int(match[1]), []).append((inode, file.offset, len(line)))
                        yield int(match[1])
                    file.offset += len(line) + 1

    def records(self, window: int, skip: int = 0) -> Iterator[WindowRecord]:
        """The usable lines of a window, one per rank, without the first `skip` lines."""
        seen: set[int] = set()
        for number, (inode, offset, length) in enumerate(list(self._places.get(window, ()))):
            file = self._files[inode]
            if number < skip:
                seen.add(file.rank)
                continue
            try:
                with file.path.open("rb") as stream:
                    stream.seek(offset)
                    record = WindowRecord.from_line(stream.read(length).decode())
            except (OSError, ValueError):
                continue
            shape = (record.num_ranks, record.node_of_rank)
            self.shape = self.shape or shape
            if record.rank == file.rank and record.rank not in seen and shape == self.shape:
                seen.add(record.rank)
                yield record
