"""LogSource: a recording of a log directory, open at once and read in the background. Knows no requests.

It follows a run that is still being written.
"""

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from ..detect.report import Report
from ..detect.topology import LinkTopology
from ..log.events import WindowRecord
from ..log.reader import LogReader, no_usable_line, open_log
from ..mutes import FILE_NAME, JobPlaces, Mute, MuteChange, MuteFile, with_mutes
from ..windows.baseline import Baseline
from ..windows.history import History, most_rows
from ..windows.matrices import WindowMatrices
from ..windows.totals import WindowTotals
from ..windows.view import WindowView
from ..windows.window_sums import WindowSums, most_kept
from .recording import ReadOnlyError, Recording

_log = logging.getLogger(__name__)
_POLL_S = 1.0
_LIVE_S = 60.0  # a log that nobody has written to for so long has ended
_LINES_AT_ONCE = 200  # read before another thread may have the lock


class LogSource(Recording):
    """OSError or ValueError without a usable line, or with a file to compare with that does not fit.

    run: by number; None: the newest, also when one begins later.
    baseline: a file of Baseline. topology: a file of eprt.topology/1.
    """

    def __init__(
        self,
        directory: str | Path,
        run: int | None = None,
        windows: tuple[int, int] | None = None,
        baseline: str | Path | None = None,
        topology: str | Path | None = None,
    ):
        self._run, self._windows = run, windows
        reader = open_log(directory, run, windows)
        first = next(reader.new_records(), None)
        if first is None:
            raise no_usable_line(directory, reader.problems())
        super().__init__(str(directory), first[0].num_ranks, first[0].node_of_rank)
        if baseline is not None:
            self.baseline = Baseline.load(baseline)
            self.baseline.check_fits(first[0].node_of_rank)
        nodes = np.array(first[0].node_of_rank)
        self._topology = None if topology is None else LinkTopology.from_file(topology, nodes)
        self._index = reader.index
        self._io = threading.RLock()  # the index is not for several threads at once
        self._begin_run()
        self._mutes = MuteFile(reader.index.directory / FILE_NAME)
        self._known_mutes: list[Mute] = []
        self._report: tuple[dict[str, Any], Sequence[object]] | None = None  # eprt.findings/1 without mutes, problems
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="eprt-log-reader", daemon=True)
        self._thread.start()

    def _begin_run(self) -> None:
        """Forgets what was read: begins with the chosen run, or the newest."""
        reader = LogReader(self._index, self._run, self._windows)
        self._reader, self.run, self.num_runs = reader, reader.run_number, len(self._index.runs)
        self.num_ranks, self.progress = reader.run.num_ranks, 0.0
        self.history = History(self.num_ranks, most_rows(self.num_ranks))
        self._sums = WindowSums(self.num_ranks, most_kept(self.num_ranks))

    def window(self, number: int | None) -> WindowView:
        if number is None:
            with self.lock:
                return self._sums.total().view(None)
        records = self._read_again(number, number + self.history.rows.windows_per_span - 1)
        totals = WindowTotals.from_records(self.num_ranks, records)
        if not len(totals.windows):
            raise LookupError(f"window {number}: no usable line")
        return totals.view(number)

    def records(self, window: int) -> list[WindowRecord]:
        return list(self._read_again(window, window))

    def _read_again(self, first: int, last: int) -> Iterator[WindowRecord]:
        with self._io:
            yield from self._reader.records(first, last)

    def link(self, src: int, dst: int) -> dict[str, Any]:
        with self.lock:
            return self._sums.link(src, dst)

    def matrices(self) -> WindowMatrices:
        with self.lock:
            return self._sums.matrices()

    def why_read_only(self) -> str:
        return self._mutes.why_read_only()

    def places(self) -> JobPlaces:
        return _with_tiers(super().places(), self._topology)

    def change_mutes(self, change: MuteChange) -> bool:
        if why := self.why_read_only():
            raise ReadOnlyError(why)
        changed = self._mutes.change(change, time.time())
        self._tell_findings(is_new=False)
        return changed

    def close(self) -> None:
        self._stop.set()
        self._thread.join(timeout=5)

    # -- in the background --

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
                    self._begin_run()
        if new:
            self._read_new()
        if new and not self._stop.is_set():
            with self.lock:
                matrices, problems = self._sums.matrices(), self._reader.problems()
            report = Report.from_matrices(
                matrices,
                problems,
                self._reader.skipped.num_lines,
                topology=self._topology,
                baseline=self.baseline,
            )
            self._report = report.to_json(), report.problems
        self._tell_findings(is_new=new)
        written_s = (path.stat().st_mtime for path in self._index.directory.glob("diagnose_rank*.log"))
        live = time.time() - max(written_s, default=0.0) < _LIVE_S
        if live != self.live:
            self.live = live
            self.mark_changed()
        return new

    def _tell_findings(self, is_new: bool) -> None:
        """With the mutes of the file, which others may have changed. is_new: whether there is a new report."""
        try:
            mutes = self._mutes.read(time.time())
        except (OSError, ValueError) as error:
            if is_new:
                _log.warning("%s", error)
            mutes = []
        with self.lock:
            if self._report is None or (not is_new and mutes == self._known_mutes):
                return
            self._known_mutes = mutes
            findings, problems = self._report
            self.set_findings({**findings, "findings": with_mutes(findings["findings"], mutes)}, problems)

    def _read_new(self) -> None:
        records, more = self._reader.new_records(), True
        while more and not self._stop.is_set():
            with self._io, self.lock:
                num = 0
                for record, place in islice(records, _LINES_AT_ONCE):
                    self.history.add_record(record)
                    self._sums.add_record(record, place)
                    num += 1
                more = num == _LINES_AT_ONCE
                self.node_of_rank = list(self._sums.node_of_rank)
                self.progress = min(1.0, self._reader.bytes_read / max(1, self._index.num_bytes)) if more else 1.0
            self.mark_changed()


def job_places(record: WindowRecord, topology: str | Path | None) -> JobPlaces:
    """Of the line's job. topology: a file of eprt.topology/1. OSError or ValueError where that does not fit."""
    nodes = np.array(record.node_of_rank)
    places = JobPlaces(record.num_ranks, frozenset(nodes.tolist()))
    return _with_tiers(places, None if topology is None else LinkTopology.from_file(topology, nodes))


def _with_tiers(places: JobPlaces, topology: LinkTopology | None) -> JobPlaces:
    if topology is None:
        return places
    return replace(places, tiers=tuple(dict.fromkeys((*places.tiers, *topology.names))))
