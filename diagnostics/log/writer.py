"""WindowWriter: appends records to a diagnosis log and keeps its files bounded. Does not know a line's format."""

import os
from collections.abc import Sequence
from pathlib import Path

from .events import FILE_NAME, WindowRecord

MAX_BYTES = 32 << 20
_TAIL_BYTES = 4 << 20  # of a file, in which its last whole line is looked for


class WindowWriter:
    """Writes directory/diagnose_rank{r}.log. Rank 0 writes for all ranks, so that a rank's log outlives the rank.

    A line is written by one append, so a reader never sees half a line of a living writer; a line that a crash cut off
    is ended by a newline at the next start. A new run in an old directory calls `new_run`, then counts its windows from
    `first_window`.

    directory: created where it does not exist.
    max_bytes: a file that would pass it becomes diagnose_rank{r}.log.1 and replaces the one before: a rank never takes
        more than twice as much.
    """

    def __init__(self, directory: str | Path, max_bytes: int = MAX_BYTES):
        if max_bytes < 1:
            raise ValueError(f"max_bytes={max_bytes}: must be at least 1")
        self.directory, self.max_bytes = Path(directory), max_bytes
        self.directory.mkdir(parents=True, exist_ok=True)
        self._started: set[int] = set()

    def new_run(self, num_ranks: int, node_of_rank: Sequence[int]) -> Path | None:
        """Moves a log of other ranks or nodes to directory/earlier-K, which is returned. OSError from the disk."""
        last = _last_records(self.directory)
        if all((record.num_ranks, record.node_of_rank) == (num_ranks, tuple(node_of_rank)) for record in last):
            return None
        k = 1
        while (aside := self.directory / f"earlier-{k}").exists():
            k += 1
        aside.mkdir()
        for path in _log_files(self.directory):
            path.replace(aside / path.name)
        return aside

    @property
    def first_window(self) -> int:
        """The number after the largest in the directory; 0 in an empty one."""
        return max((record.window + 1 for record in _last_records(self.directory)), default=0)

    def write(self, record: WindowRecord) -> None:
        """OSError when the disk refuses."""
        path = self.directory / f"diagnose_rank{record.rank}.log"
        line = record.to_line().encode()
        size = path.stat().st_size if path.exists() else 0
        if size and record.rank not in self._started and not _ends_with_newline(path):
            line = b"\n" + line
        self._started.add(record.rank)
        if size and size + len(line) > self.max_bytes:
            path.replace(path.with_name(path.name + ".1"))
            line = line.removeprefix(b"\n")
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            written = os.write(descriptor, line)
            if written != len(line):  # a full disk: leave no half line behind
                os.truncate(descriptor, os.fstat(descriptor).st_size - written)
                raise OSError(f"{path}: only {written} of {len(line)} bytes could be written; is the disk full?")
        finally:
            os.close(descriptor)


def _log_files(directory: Path) -> list[Path]:
    return [path for path in directory.iterdir() if FILE_NAME.match(path.name)]


def _last_records(directory: Path) -> list[WindowRecord]:
    """The last usable line of each file."""
    return [record for path in _log_files(directory) if (record := _last_record(path)) is not None]


def _last_record(path: Path) -> WindowRecord | None:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
        lines = file.read().split(b"\n")
    for line in reversed(lines):
        try:
            return WindowRecord.from_line(line.decode())
        except ValueError:
            continue
    return None


def _ends_with_newline(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"
