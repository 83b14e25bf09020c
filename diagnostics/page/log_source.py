"""LogSource: a log directory, opened at once and read behind the reader's back; follows a run that still writes."""

import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..detect.report import Report
from ..log.events import WindowRecord
from ..log.index import LogIndex
from ..log.reader import LogReader, no_line, open_log
from ..windows.history import History, most_rows
from ..windows.window import Totals, Window
from ..windows.window_sums import WindowSums, most_kept
from . import expert_view
from .recording import Recording

_log = logging.getLogger(__name__)
_POLL_S = 1.0
_LIVE_S = 60.0  # a log that nobody has written to for so long is over
_LINES_AT_ONCE = 200  # read before somebody else may have the lock


class LogSource(Recording):
    """run: by number, of a directory that several runs have used; None: the newest, also when one begins later.
    windows: the first and the last to look at.

    OSError or ValueError when the directory cannot be read or has no usable line.
    """

    def __init__(self, directory: str | Path, run: int | None = None, windows: tuple[int, int] | None = None):
        self._run, self._windows = run, windows
        reader = open_log(directory, run, windows)
        first = next(reader.new_records(), None)
        if first is None:
            raise no_line(directory, [*reader.problems.told(), *reader.remarks()])
        super().__init__(str(directory), first[0].num_ranks, first[0].node_of_rank)
        self._index: LogIndex = reader.index
        self._io = threading.RLock()  # the index is not for several threads at once
        self._begin()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="eprt-log-reader", daemon=True)
        self._thread.start()

    def _begin(self) -> None:
        """Forgets what was read: with the chosen run, or the newest."""
        reader = LogReader(self._index, self._run, self._windows)
        self._reader, self.run, self.num_runs = reader, reader.run_number, len(self._index.runs)
        self.num_ranks, self.progress = reader.run.num_ranks, 0.0
        self.history = History(self.num_ranks, most_rows=most_rows(self.num_ranks))
        self._totals = Totals(self.num_ranks)
        self._sums = WindowSums(self.num_ranks, (), most_kept(self.num_ranks))

    def window(self, number: int | None) -> Window:
        if number is None:
            with self.lock:
                return self._totals.window()
        totals = Totals(self.num_ranks)
        found = False
        for record in self._records(number, number + self.history.per_row - 1):
            totals.add(record)
            found = True
        if not found:
            raise LookupError(f"window {number}: no usable line")
        return totals.window(number)

    def records(self, number: int) -> list[WindowRecord]:
        return list(self._records(number, number))

    def _records(self, first: int, last: int) -> Iterator[WindowRecord]:
        with self._io:
            yield from self._reader.records(first, last)

    def link(self, src: int, dst: int) -> dict[str, Any]:
        with self.lock:
            return self._sums.link(src, dst)

    def outside_experts(self) -> tuple[dict[str, Any] | None, list[str]]:
        return expert_view.from_files(self._index.directory)

    def close(self) -> None:
        self._stop.set()
        self._thread.join(timeout=5)

    # -- behind the reader's back --

    def _follow(self) -> None:
        took_s, is_first = 0.0, True
        while not self._stop.wait(0 if is_first else max(_POLL_S, 5 * took_s)):
            started_s = time.monotonic()
            try:
                if self._catch_up(is_first):
                    took_s = time.monotonic() - started_s
                is_first = False
            except Exception as error:  # the thread must outlive a disk that is away for a moment
                _log.warning("%s: %s", self.name, error)

    def _catch_up(self, is_first: bool) -> bool:
        """Whether there was anything new."""
        with self._io:
            new = self._index.refresh() or is_first
            if self._run is None and len(self._index.runs) > self.num_runs:
                with self.lock:
                    self._begin()
        if new:
            self._read()
        if new and not self._stop.is_set():
            with self.lock:
                matrices = self._sums.matrices()
                problems = [*self._reader.problems.told(), *self._reader.remarks()]
            report = Report.of(matrices, problems, self._reader.problems.num_lines)
            self.say(report.to_json(), report.problems)
        live = time.time() - _changed_s(self._index.directory) < _LIVE_S
        if live != self.live:
            self.live = live
            self.changed()
        return new

    def _read(self) -> None:
        records, more = self._reader.new_records(), True
        while more and not self._stop.is_set():
            with self._io, self.lock:
                for _ in range(_LINES_AT_ONCE):
                    entry = next(records, None)
                    if entry is None:
                        more = False
                        break
                    record, place = entry
                    self.history.add(record)
                    self._totals.add(record)
                    self._sums.add(record, None if record.experts is None else place.experts)
                self._sums.node_of_rank = self._reader.node_of_rank or ()
                self.node_of_rank = list(self._sums.node_of_rank)
                self.progress = min(1.0, self._reader.bytes_read / max(1, self._index.num_bytes)) if more else 1.0
            self.changed()


def _changed_s(directory: Path) -> float:
    """When a log file was last written to."""
    return max((path.stat().st_mtime for path in directory.glob("diagnose_rank*.log")), default=0.0)
