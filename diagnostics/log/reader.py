"""LogReader: the usable lines of one run of a log directory, each once, and what of the log could not be used.

Reads a rank's file after the other and keeps none of the lines, so that a log may be larger than the memory.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .events import ExpertRows, WindowRecord
from .index import MOST_LINE_BYTES, UNKNOWN, LogFile, LogIndex, Run

_MOST_PROBLEMS = 20  # of a file that are told one by one


@dataclass(frozen=True)
class LogProblem:
    """Something in the log that could not be used. line: 1-based, 0 when the whole file is meant."""

    file: Path
    line: int
    message: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.message}" if self.line else f"{self.file}: {self.message}"


class Problems:
    """The first of each file in words, the others counted. num_lines: lines that were skipped."""

    def __init__(self):
        self._told: dict[Path, list[LogProblem]] = {}
        self._lines_of: Counter[Path] = Counter()

    @property
    def num_lines(self) -> int:
        return self._lines_of.total()

    def add(self, problem: LogProblem) -> None:
        self._lines_of[problem.file] += bool(problem.line)
        told = self._told.setdefault(problem.file, [])
        if len(told) < _MOST_PROBLEMS or not problem.line:
            told.append(problem)

    def told(self) -> list[LogProblem]:
        out = []
        for file, problems in self._told.items():
            more = self._lines_of[file] - sum(bool(problem.line) for problem in problems)
            out += problems
            if more:
                out.append(LogProblem(file, 0, f"{more} more lines could not be used"))
        return out


@dataclass(frozen=True)
class LogPlace:
    """Where a line stands."""

    file: LogFile
    index: int

    def read(self) -> WindowRecord | None:
        """None when it is not there any more."""
        try:
            ((_, raw),) = self.file.lines(self.index, self.index + 1)
            return WindowRecord.from_line(raw.decode())
        except (OSError, ValueError):
            return None

    def experts(self) -> ExpertRows | None:
        record = self.read()
        return None if record is None else record.experts


class LogReader:
    """run: which of index.runs, by number; None: the newest. windows: first and last to read; None: all of the run.

    ValueError when there is no such run or window.
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
        self.problems = Problems()
        self.node_of_rank: tuple[int, ...] | None = None
        self.num_windows = 0
        self._taken: dict[LogFile, int] = {}  # lines
        self._seen: dict[int, _Windows] = {}  # by rank
        self.bytes_read = 0

    @property
    def run(self) -> Run:
        return self.index.runs[self.run_number - 1]

    def new_records(self) -> Iterator[tuple[WindowRecord, LogPlace]]:
        """What the index has found since the last call."""
        self._taken = {file: k for file, k in self._taken.items() if file in self.index.files}
        for file in self.index.files:
            first, last = self._taken.get(file, 0), len(file.offsets)
            try:
                for k, raw in self._lines(file, first, last):
                    self._taken[file] = k + 1
                    record = self._record(file, k, raw)
                    if record is not None:
                        yield record, LogPlace(file, k)
                self._taken[file] = last
            except FileNotFoundError:  # rotated this very moment: the next refresh knows where it is
                continue

    def records(self, first_window: int, last_window: int) -> Iterator[WindowRecord]:
        """The usable lines of windows that were read before, again."""
        run, seen = self.run, set()
        for file in self.index.files:
            for k in file.at(first_window, last_window):
                if (file.rank, file.parts[k]) not in run.parts or k >= self._taken.get(file, 0):
                    continue
                record = LogPlace(file, k).read()
                if record is None or (record.rank, record.num_ranks) != (file.rank, run.num_ranks):
                    continue
                if record.node_of_rank == self.node_of_rank and (record.window, record.rank) not in seen:
                    seen.add((record.window, record.rank))
                    yield record

    def _lines(self, file: LogFile, first: int, last: int) -> Iterator[tuple[int, bytes]]:
        """Those of the run and the windows, and those that tell no window."""
        parts, run = file.parts, self.run.parts
        begin, end = self._windows or (0, 1 << 62)

        def is_wanted(k: int) -> bool:
            window = file.windows[k]
            return (file.rank, parts[k]) in run and (begin <= window <= end or window == UNKNOWN)

        k = first
        while k < last:
            if not is_wanted(k):
                k += 1
                continue
            stop = k + 1
            while stop < last and is_wanted(stop):
                stop += 1
            for line, raw in file.lines(k, stop):
                self.bytes_read += len(raw)
                yield line, raw
            k = stop

    def _record(self, file: LogFile, k: int, raw: bytes) -> WindowRecord | None:
        start = file.offsets[k]
        end = file.offsets[k + 1] if k + 1 < len(file.offsets) else file.end
        if end - start > MOST_LINE_BYTES:
            self.problems.add(LogProblem(file.path, k + 1, f"{end - start} bytes without a newline"))
            return None
        if not raw.strip():
            return None
        try:
            record = WindowRecord.from_line(raw.decode())
            self._check(file, record)
        except ValueError as error:
            self.problems.add(LogProblem(file.path, k + 1, str(error)))
            return None
        return record

    def _check(self, file: LogFile, record: WindowRecord) -> None:
        if record.rank != file.rank:
            raise ValueError(f"a line of rank {record.rank} in the file of rank {file.rank}")
        if record.num_ranks != self.run.num_ranks:
            raise ValueError(f"a line of {record.num_ranks} ranks; most lines of this run tell of {self.run.num_ranks}")
        self.node_of_rank = self.node_of_rank or record.node_of_rank
        if record.node_of_rank != self.node_of_rank:
            other = next(r for r, (a, b) in enumerate(zip(record.node_of_rank, self.node_of_rank)) if a != b)
            raise ValueError(
                f"rank {other} is on node {record.node_of_rank[other]}; in the lines before: {self.node_of_rank[other]}"
            )
        seen = self._seen.setdefault(record.rank, _Windows())
        if not seen.add(record.window):
            raise ValueError(f"window {record.window} is there twice")

    def remarks(self) -> list[LogProblem]:
        """What is wrong with the log as a whole, and lines that end in the middle."""
        out, directory = [], self.index.directory
        num_runs, run = len(self.index.runs), self.run
        if num_runs > 1:
            others = f"runs 1 to {num_runs - 1} are" if num_runs > 2 else "run 1 is"
            which = f"the newest, {num_runs}" if run.number == num_runs else f"run {run.number}"
            how = f"{others} not in here" if run.number == num_runs else f"it has {num_runs} runs"
            out.append(LogProblem(directory, 0, f"a job was started {num_runs} times with it; this is {which}; {how}"))
        for file in self.index.files:
            cut_off = file.path.stat().st_size - file.end if file.path.exists() else 0
            if cut_off > 0:
                out.append(LogProblem(file.path, len(file.offsets) + 1, f"the line is cut off after {cut_off} bytes"))
        silent = [rank for rank in range(run.num_ranks) if rank not in self._seen]
        if silent:
            names = ", ".join(map(str, silent[:20])) + (f" and {len(silent) - 20} more" if len(silent) > 20 else "")
            out.append(LogProblem(directory, 0, f"nothing from rank {names} of {run.num_ranks}"))
        return out


class _Windows:
    """A set of window numbers, kept as ranges: most logs are one."""

    def __init__(self):
        self._firsts: list[int] = []
        self._lasts: list[int] = []

    def add(self, window: int) -> bool:
        """Whether it is new."""
        k = bisect_right(self._firsts, window) - 1
        if k >= 0 and window <= self._lasts[k]:
            return False
        joins_before = k >= 0 and self._lasts[k] == window - 1
        joins_after = k + 1 < len(self._firsts) and self._firsts[k + 1] == window + 1
        if joins_before and joins_after:
            self._lasts[k] = self._lasts.pop(k + 1)
            del self._firsts[k + 1]
        elif joins_before:
            self._lasts[k] = window
        elif joins_after:
            self._firsts[k + 1] = window
        else:
            self._firsts.insert(k + 1, window)
            self._lasts.insert(k + 1, window)
        return True


@dataclass(frozen=True)
class WindowLog:
    """records: sorted by window, then rank, one of each pair. problems: what was skipped, and where."""

    records: tuple[WindowRecord, ...]
    problems: tuple[LogProblem, ...]


def open_log(directory: str | Path, run: int | None = None, windows: tuple[int, int] | None = None) -> LogReader:
    """OSError when the directory cannot be read; ValueError when it holds no log, no line of one, or no such run."""
    index = LogIndex(directory)
    index.refresh()
    if not index.files:
        raise ValueError(f"{directory} holds no diagnose_rank*.log")
    if not index.runs:
        problems = Problems()
        for file in index.files:
            for k, raw in file.lines(0):
                if raw.strip():
                    problems.add(LogProblem(file.path, k + 1, _what_is_wrong(raw)))
            if file.path.stat().st_size > file.end:
                problems.add(LogProblem(file.path, len(file.offsets) + 1, "the line is cut off"))
        raise no_line(directory, problems.told())
    return LogReader(index, run, windows)


def no_line(directory: str | Path, problems: list[LogProblem]) -> ValueError:
    return ValueError(f"{directory}: no usable line" + "".join(f"\n  {problem}" for problem in problems[:10]))


def _what_is_wrong(raw: bytes) -> str:
    try:
        WindowRecord.from_line(raw.decode())
    except ValueError as error:
        return str(error)
    return "no window number"


def read_log(directory: str | Path, run: int | None = None) -> WindowLog:
    """All usable lines of a run (by number; None: the newest), in memory. Broken lines are skipped and reported.

    OSError when the directory cannot be read; ValueError when it holds no such file or no usable line.
    """
    reader = open_log(directory, run)
    records = sorted((record for record, _ in reader.new_records()), key=lambda r: (r.window, r.rank))
    problems = [*reader.problems.told(), *reader.remarks()]
    if not records:
        raise no_line(directory, problems)
    return WindowLog(tuple(records), tuple(problems))
