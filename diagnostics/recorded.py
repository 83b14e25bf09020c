"""LogSource: a log directory, opened at once and read behind the reader's back; follows a run that still writes."""

import logging
import threading
import time
from pathlib import Path
from typing import Any

from . import expertview
from .events import WindowRecord
from .logindex import LogIndex
from .recording import Recording
from .report import analyse
from .window import Totals, Window

_log = logging.getLogger(__name__)
_POLL_S = 1.0
_LIVE_S = 60.0  # a log that nobody has written to for so long is over


class LogSource(Recording):
    """OSError or ValueError when the directory cannot be read or has no usable line."""

    def __init__(self, directory: str | Path):
        self._index = LogIndex(directory)
        self._index.refresh()
        first = next((record for w in self._index.windows() for record in self._index.records(w)), None)
        if first is None:
            analyse(directory)  # says what is wrong
            raise ValueError(f"{directory}: no usable line")
        super().__init__(str(directory), first.num_ranks, first.node_of_rank)
        self._totals = Totals(self.num_ranks)
        self._num_read: dict[int, int] = {}  # window -> lines taken into history and totals
        self.progress = 0.0
        self._io = threading.Lock()  # the index is not for several threads at once
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="eprt-log-reader", daemon=True)
        self._thread.start()

    def window(self, number: int | None) -> Window:
        if number is None:
            with self.lock:
                return self._totals.window()
        records = self.records(number)
        if not records:
            raise LookupError(f"window {number}: no usable line")
        return Window.of(records)

    def records(self, number: int) -> list[WindowRecord]:
        with self._io:
            return list(self._index.records(number))

    def outside_experts(self) -> tuple[dict[str, Any] | None, list[str]]:
        return expertview.from_files(self._index.directory)

    def close(self) -> None:
        self._stop.set()
        self._thread.join(timeout=5)

    # -- behind the reader's back --

    def _follow(self) -> None:
        took_s = 0.0
        while not self._stop.wait(max(_POLL_S, 5 * took_s) if self._num_read else 0):
            started_s = time.monotonic()
            try:
                if self._catch_up():
                    took_s = time.monotonic() - started_s
            except Exception as error:  # the thread must outlive a disk that is away for a moment
                _log.warning("%s: %s", self.name, error)

    def _catch_up(self) -> bool:
        """Whether there was anything new."""
        with self._io:
            new = self._index.refresh() if self._num_read else set(self._index.windows())
        self._read(sorted(new))
        if new and not self._stop.is_set():
            report = analyse(self._index.directory)
            self.say(report.to_json(), report.problems)
        live = time.time() - _changed_s(self._index.directory) < _LIVE_S
        if live != self.live:
            self.live = live
            self.changed()
        return bool(new)

    def _read(self, windows: list[int]) -> None:
        for k, window in enumerate(windows):
            if self._stop.is_set():
                return
            with self._io:
                num_lines = self._index.num_lines(window)
                records = list(self._index.records(window, self._num_read.get(window, 0)))
            with self.lock:
                for record in records:
                    self.history.add(record)
                    self._totals.add(record)
                self._num_read[window] = num_lines
                self.progress = (k + 1) / len(windows)
            self.changed()


def _changed_s(directory: Path) -> float:
    """When a log file was last written to."""
    return max((path.stat().st_mtime for path in directory.glob("diagnose_rank*.log")), default=0.0)
