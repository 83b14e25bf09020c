"""LogReader: the usable lines of one run, each once, and the problems of the others. Does not interpret the records.

It reads the ranks' files one after another and keeps no line, so that a log may be larger than the memory.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from .events import ExpertRows, WindowRecord
from .files import MOST_LINE_BYTES, UNKNOWN, LogFile
from .index import LogIndex, LogRun
from .line import read_line
from .window_ranges import WindowRanges

_MOST_PROBLEMS = 20  # of a file that are listed one by one


@dataclass(frozen=True)
class LogProblem:
    """Something in the log that could not be used."""

    file: Path
    line: int  # 1-based; 0: the whole file
    message: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.message}" if self.line else f"{self.file}: {self.message}"


class ProblemList:
    """The skipped lines: the first of each file one by one, the others counted."""

    def __init__(self):
        self._first: defaultdict[Path, list[LogProblem]] = defaultdict(list)
        self._num_lines: Counter[Path] = Counter()

    @property
    def num_lines(self) -> int:
        return self._num_lines.total()

    def add_line(self, file: Path, line: int, message: str) -> None:
        self._num_lines[file] += 1
        if len(self._first[file]) < _MOST_PROBLEMS:
            self._first[file].append(LogProblem(file, line, message))

    def to_list(self) -> list[LogProblem]:
        problems = []
        for file, first in self._first.items():
            problems += first
            if more := self._num_lines[file] - len(first):
                problems.append(LogProblem(file, 0, f"{more} more lines could not be used"))
        return problems


@dataclass(frozen=True)
class LogPlace:
    """Where a line is."""

    file: LogFile
    index: int

    def read(self) -> WindowRecord | None:
        """None when it is no longer there."""
        try:
            ((_, raw),) = self.file.read_lines([self.index])
            return read_line(raw)
        except (OSError, ValueError):
            return None

    @property
    def experts(self) -> ExpertRows | None:
        record = self.read()
        return None if record is None else record.experts


class LogReader:
    """Reads what the index has found. ValueError when there is no such run or window.

    run: which of index.runs, by number; None: the newest.
    windows: first and last to read; None: all of the run.
    """

    def __init__(self, index: LogIndex, run: int | None = None, windows: tuple[int, int] | None = None):
        if run is not None and not 1 <= run <= len(index.runs):
            runs = f"{len(index.runs)} run{'' if len(index.runs) == 1 else 's'}"
            raise ValueError(f"{index.directory} holds {runs}; there is no run {run}")
        self.index, self._windows = index, windows
        self.run_number = run or len(index.runs)
        first, last = self.run.first_window, self.run.last_window
        if windows is not None and not (windows[0] <= last and first <= windows[1]):
            raise ValueError(f"{index.directory} has the windows {first} to {last}, and none of those asked for")
        self.bytes_read = 0
        self.skipped = ProblemList()
        self._node_of_rank: tuple[int, ...] | None = None  # as the first usable line has it
        self._lines_read: dict[LogFile, int] = {}
        self._seen: dict[int, WindowRanges] = {}  # by rank

    @property
    def run(self) -> LogRun:
        return self.index.runs[self.run_number - 1]

    def new_records(self) -> Iterator[tuple[WindowRecord, LogPlace]]:
        """What the index has found since the last call."""
        self._lines_read = {file: k for file, k in self._lines_read.items() if file in self.index.files}
        for file in self.index.files:
            last = file.num_lines
            wanted = [k for k in range(self._lines_read.get(file, 0), last) if self._is_wanted(file, k)]
            try:
                for k, raw in file.read_lines(wanted) if wanted else ():
                    self.bytes_read += len(raw)
                    self._lines_read[file] = k + 1
                    record = self._parse(file, k, raw)
                    if record is not None:
                        yield record, LogPlace(file, k)
                self._lines_read[file] = last
            except FileNotFoundError:  # rotated this very moment: the next refresh finds it
                continue

    def records(self, first_window: int, last_window: int) -> Iterator[WindowRecord]:
        """The usable lines of windows that were read before, read again."""
        run, seen = self.run, set()
        for file in self.index.files:
            for k in file.find_lines(first_window, last_window):
                if (file.rank, file.parts[k]) not in run.parts or k >= self._lines_read.get(file, 0):
                    continue
                record = LogPlace(file, k).read()
                if record is None or (record.rank, record.num_ranks) != (file.rank, run.num_ranks):
                    continue
                if record.node_of_rank == self._node_of_rank and (record.window, record.rank) not in seen:
                    seen.add((record.window, record.rank))
                    yield self._timed(record)

    def _is_wanted(self, file: LogFile, k: int) -> bool:
        """A line of the run and the windows, or one without a window number."""
        window = file.windows[k]
        begin, end = self._windows or (0, window)
        return (file.rank, file.parts[k]) in self.run.parts and (begin <= window <= end or window == UNKNOWN)

    def _parse(self, file: LogFile, k: int, raw: bytes) -> WindowRecord | None:
        length = file.offsets[k + 1] - file.offsets[k]
        if length > MOST_LINE_BYTES:
            self.skipped.add_line(file.path, k + 1, f"{length} bytes without a newline")
            return None
        if not raw.strip():
            return None
        try:
            record = read_line(raw)
            self._check(file, record)
        except ValueError as error:
            self.skipped.add_line(file.path, k + 1, str(error))
            return None
        return self._timed(record)

    def _timed(self, record: WindowRecord) -> WindowRecord:
        """With the times of the first rank's clock."""
        ahead_s = self.run.ahead_s.get(record.rank, 0.0)
        if not ahead_s:
            return record
        return replace(record, t_start=max(0.0, record.t_start - ahead_s), t_end=max(0.0, record.t_end - ahead_s))

    def _check(self, file: LogFile, record: WindowRecord) -> None:
        if record.rank != file.rank:
            raise ValueError(f"a line of rank {record.rank} in the file of rank {file.rank}")
        if record.num_ranks != self.run.num_ranks:
            raise ValueError(f"a line of {record.num_ranks} ranks; most lines of this run tell of {self.run.num_ranks}")
        if record.window > self.run.last_window:
            others = f"{self.run.first_window} to {self.run.last_window}"
            raise ValueError(f"window {record.window}: the other lines of this run have windows {others}")
        self._node_of_rank = self._node_of_rank or record.node_of_rank
        if record.node_of_rank != self._node_of_rank:
            nodes = zip(record.node_of_rank, self._node_of_rank)
            rank, (node, before) = next((r, pair) for r, pair in enumerate(nodes) if pair[0] != pair[1])
            raise ValueError(f"rank {rank} is on node {node}; in the lines before: {before}")
        if not self._seen.setdefault(record.rank, WindowRanges()).add_window(record.window):
            raise ValueError(f"window {record.window} is there twice")

    def problems(self) -> list[LogProblem]:
        """The skipped lines, lines that end in the middle, and what is wrong with the log as a whole."""
        out, directory = self.skipped.to_list(), self.index.directory
        num_runs, run = len(self.index.runs), self.run
        if num_runs > 1:
            others = f"runs 1 to {num_runs - 1} are" if num_runs > 2 else "run 1 is"
            which = f"the newest, {num_runs}" if run.number == num_runs else f"run {run.number}"
            how = f"{others} not in here" if run.number == num_runs else f"it has {num_runs} runs"
            out.append(LogProblem(directory, 0, f"a job was started {num_runs} times with it; this is {which}; {how}"))
        for file in self.index.files:
            if cut_off := file.num_cut_off:
                out.append(LogProblem(file.path, file.num_lines + 1, f"the line is cut off after {cut_off} bytes"))
            if file.problem:
                out.append(LogProblem(file.path, file.num_lines + 1, file.problem))
        out += [LogProblem(path, 0, "is not a regular file: skipped") for path in self.index.refused]
        for rank, ahead_s in sorted(run.ahead_s.items()):
            first, way = min(run.parts)[0], "ahead of" if ahead_s > 0 else "behind"
            message = f"the clock of rank {rank} is {abs(ahead_s):.0f} s {way} rank {first}'s: its times are moved"
            out.append(LogProblem(directory, 0, message))
        silent = [rank for rank in range(run.num_ranks) if rank not in self._seen]
        if silent:
            names = ", ".join(map(str, silent[:20])) + (f" and {len(silent) - 20} more" if len(silent) > 20 else "")
            out.append(LogProblem(directory, 0, f"nothing from rank {names} of {run.num_ranks}"))
        return out


@dataclass(frozen=True)
class WindowLog:
    """A run, read into memory."""

    records: tuple[WindowRecord, ...]  # sorted by window, then rank, one of each pair
    problems: tuple[LogProblem, ...]  # what was skipped, and where


def open_log(directory: str | Path, run: int | None = None, windows: tuple[int, int] | None = None) -> LogReader:
    """OSError when the directory cannot be read; ValueError when it holds no log, no line of one, or no such run."""
    index = LogIndex(directory)
    index.refresh()
    if not index.files and index.refused:
        raise ValueError(f"{index.refused[0]} is not a regular file")
    if not index.files:
        raise ValueError(f"{directory} holds no diagnose_rank*.log")
    if not index.runs:
        problems = ProblemList()
        for file in index.files:
            for k, raw in file.read_lines(range(file.num_lines)):
                if not raw.strip():
                    continue
                message = "no window number"
                try:
                    read_line(raw)
                except ValueError as error:
                    message = str(error)
                problems.add_line(file.path, k + 1, message)
            if file.num_cut_off:
                problems.add_line(file.path, file.num_lines + 1, "the line is cut off")
            if file.problem:
                problems.add_line(file.path, file.num_lines + 1, file.problem)
        raise no_usable_line(directory, problems.to_list())
    return LogReader(index, run, windows)


def no_usable_line(directory: str | Path, problems: list[LogProblem]) -> ValueError:
    return ValueError(f"{directory}: no usable line" + "".join(f"\n  {problem}" for problem in problems[:10]))


def read_log(directory: str | Path, run: int | None = None) -> WindowLog:
    """All usable lines of a run, in memory. Broken lines are skipped and reported. run: by number; None: the newest.

    OSError when the directory cannot be read; ValueError when it holds no such file or no usable line.
    """
    reader = open_log(directory, run)
    records = sorted((record for record, _ in reader.new_records()), key=lambda r: (r.window, r.rank))
    if not records:
        raise no_usable_line(directory, reader.problems())
    return WindowLog(tuple(records), tuple(reader.problems()))
