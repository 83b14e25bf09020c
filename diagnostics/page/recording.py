"""Recording: what the page is served from, and when it changed. Knows neither HTTP nor where the records come from.

Its sources: a directory (log_source.py), windows in memory (kept_source.py), a server over HTTP (server_source.py).
"""

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from ..log.events import WindowRecord
from ..mutes import JobPlaces, MuteChange
from ..windows.baseline import Baseline
from ..windows.expert_load import ExpertLoad
from ..windows.history import History
from ..windows.matrices import WindowMatrices
from ..windows.usual import UsualWaits
from ..windows.view import WindowView, pack

PAGE_SCHEMA = "eprt.page/1"
_MOST_PROBLEMS_SHOWN = 50


class ReadOnlyError(Exception):
    """Nobody may mute findings here. Says why, and what to do."""


class Recording(ABC):
    """The base of the sources. Subclasses fill `history` under `lock` and call `set_findings` after each analysis."""

    asks_for_key = False  # whether a change needs a key that the reader has to give

    def __init__(self, name: str, num_ranks: int, node_of_rank: Sequence[int]):
        self.name, self.num_ranks, self.node_of_rank = name, num_ranks, list(node_of_rank)
        self.live = False  # whether records still come
        self.progress = 1.0  # 0..1 of what is there has been read
        self.run = self.num_runs = 1  # of a directory that several runs have used
        self.history = History(num_ranks)
        self.baseline: Baseline | None = None  # of an earlier run, to compare with
        self.lock = threading.RLock()
        self._findings: dict[str, Any] | None = None
        self._problems: tuple[int, list[str]] = (0, [])  # how many, and the first
        self._trouble = ""
        self._version = 0
        self._usual: tuple[int, UsualWaits] | None = None  # with the number of findings that it is of
        self._num_findings_set = 0

    @abstractmethod
    def window(self, number: int | None) -> WindowView:
        """One window; None: all of them together, per call. LookupError where there is no such window."""

    @abstractmethod
    def records(self, window: int) -> list[WindowRecord]:
        """The usable lines of one window; empty where there are none."""

    @abstractmethod
    def link(self, src: int, dst: int) -> dict[str, Any]:
        """The course of a link (WindowSums.link). KeyError where there is no such rank."""

    @abstractmethod
    def matrices(self) -> WindowMatrices:
        """The windows as arrays; several as one entry where there are many. ValueError without any."""

    def why_read_only(self) -> str:
        """Why nobody may mute findings here, and what to do; empty: they may."""
        return "these findings are in memory only"

    def places(self) -> JobPlaces:
        """Where findings of this job can be."""
        with self.lock:  # before the first window nobody has said which nodes there are
            is_known = len(self.history.windows()) > 0
            return JobPlaces(self.num_ranks, frozenset(self.node_of_rank) if is_known else None)

    def change_mutes(self, change: MuteChange) -> bool:
        """Whether something is different now. ReadOnlyError, or OSError from the disk."""
        raise ReadOnlyError(self.why_read_only())

    def instances(self) -> dict[str, Any] | None:
        """eprt.instances/1, of a server of several instances; None elsewhere."""
        return None

    def close(self) -> None:
        """Ends what runs in the background."""

    def mark_changed(self) -> None:
        with self.lock:
            self._version += 1

    def set_findings(self, findings: dict[str, Any], problems: Sequence[object] = (), trouble: str = "") -> None:
        """findings: eprt.findings/1. problems: lines that could not be used. trouble: why there is nothing newer."""
        with self.lock:
            self._findings, self._trouble = findings, trouble
            self._problems = len(problems), [str(problem) for problem in problems[:_MOST_PROBLEMS_SHOWN]]
            self._version += 1
            self._num_findings_set += 1

    def state(self) -> dict[str, Any]:
        """Cheap: requested about once a second while the page is open."""
        with self.lock:
            windows = len(self.history.windows())
            return {"version": self._version, "windows": windows, "progress": self.progress, "live": self.live}

    def overview(self) -> dict[str, Any]:
        """windows: History.table. findings: null before the first analysis. now: Unix time, by this clock."""
        with self.lock:
            return {
                "schema": PAGE_SCHEMA,
                "name": self.name,
                **self.state(),
                "now": time.time(),
                "run": self.run,
                "num_runs": self.num_runs,
                "num_ranks": self.num_ranks,
                "node_of_rank": self.node_of_rank,
                "windows": self.history.table(),
                "findings": self._findings,
                "problems": {"count": self._problems[0], "first": self._problems[1]},
                "trouble": self._trouble,
                "baseline": self.baseline is not None,
                "muting": {"refusal": self.why_read_only(), "asks_for_key": self.asks_for_key},
            }

    def timeline(self, series: str) -> bytes:
        """A series of history.SERIES, packed: values [column][rank]. KeyError for a name that is none."""
        with self.lock:
            line = self.history.timeline(series)
        head = {"series": series, "num_ranks": self.num_ranks, "first": line.first_C, "last": line.last_C}
        return pack(head, line.values_CN)

    def usual(self) -> bytes:
        """What each link's usual wait was then: of the saved baseline, or else of the run's own past. LookupError
        without any window."""
        with self.lock:
            number, found = self._num_findings_set, (self._findings or {}).get("findings", [])
            if self._usual is None or self._usual[0] != number:
                try:
                    self._usual = number, UsualWaits.from_past(self.matrices(), found, self.baseline)
                except ValueError as error:
                    raise LookupError(str(error)) from None
            return self._usual[1].pack()

    def rank(self, rank: int) -> dict[str, Any]:
        with self.lock:
            return self.history.rank(rank)

    def experts(self, number: int | None) -> dict[str, Any]:
        """Load, placement and migrations. number: of the window; None: the newest that has the rows of all ranks."""
        with self.lock:
            moves = self.history.migrations.to_json()
            newest = self.history.migrations.newest_window(self.num_ranks)
        window = newest if number is None else number
        rows = {} if window is None else {record.rank: record.experts for record in self.records(window)}
        load = ExpertLoad.from_rows([rows.get(rank) for rank in range(self.num_ranks)])
        return {
            "schema": "eprt.experts/1",
            "experts": None if load is None else {"source": f"window {window}", **load.to_json()},
            "migrations": moves,
            "notes": ["expert load and placement: not recorded"] if load is None else [],
        }
