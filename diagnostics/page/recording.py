"""Recording: what the page is served from: a directory (log_source.py), the memory of a running server (kept_source.py)
or such a server over HTTP (server_source.py). Holds a History and the findings; says when something changed."""

import threading
from collections.abc import Sequence
from typing import Any

from ..log.events import WindowRecord
from ..windows.history import History
from ..windows.window import Window, pack
from . import expert_view

PAGE_SCHEMA = "eprt.page/1"
_MOST_PROBLEMS_SHOWN = 50


class Recording:
    """Subclasses fill `history` under `lock`, call `say` after each analysis, and provide `window` and `records`."""

    def __init__(self, name: str, num_ranks: int, node_of_rank: Sequence[int], *, most_windows: int | None = None):
        self.name, self.num_ranks, self.node_of_rank = name, num_ranks, list(node_of_rank)
        self.live, self.progress = False, 1.0
        self.run = self.num_runs = 1  # of a directory that several runs have used
        self.history = History(num_ranks, most_windows)
        self.lock = threading.RLock()
        self._findings: dict[str, Any] | None = None
        self._problems: tuple[int, list[str]] = (0, [])
        self._trouble = ""
        self._version = 0

    # -- for subclasses --

    def window(self, number: int | None) -> Window:
        """One window; None: all of them together, per call. LookupError where there is no such window."""
        raise NotImplementedError

    def records(self, number: int) -> list[WindowRecord]:
        """The usable lines of one window; empty where there are none."""
        raise NotImplementedError

    def outside_experts(self) -> tuple[dict[str, Any] | None, list[str]]:
        """Experts as something other than the log tells them (expert_view.from_replies), and remarks."""
        return None, []

    def link(self, src: int, dst: int) -> dict[str, Any]:
        """How long rank src waited for rank dst over time: WindowSums.link. KeyError where there is no such rank."""
        raise NotImplementedError

    def close(self) -> None:
        pass

    def changed(self) -> None:
        with self.lock:
            self._version += 1

    def say(self, findings: dict[str, Any], problems: Sequence[object] = (), trouble: str = "") -> None:
        """findings: eprt.findings/1. problems: lines that could not be used. trouble: why there is nothing newer."""
        with self.lock:
            self._findings, self._trouble = findings, trouble
            self._problems = len(problems), [str(problem) for problem in problems[:_MOST_PROBLEMS_SHOWN]]
            self._version += 1

    # -- for the page --

    def state(self) -> dict[str, Any]:
        """Cheap; asked about once a second while somebody looks."""
        with self.lock:
            windows = len(self.history.windows())
            return {"version": self._version, "windows": windows, "progress": self.progress, "live": self.live}

    def overview(self) -> dict[str, Any]:
        """windows: History.table. progress: 0..1 of what is there has been read. findings: null before the first
        analysis."""
        with self.lock:
            return {
                "schema": PAGE_SCHEMA,
                "name": self.name,
                **self.state(),
                "run": self.run,
                "num_runs": self.num_runs,
                "num_ranks": self.num_ranks,
                "node_of_rank": self.node_of_rank,
                "windows": self.history.table(),
                "findings": self._findings,
                "problems": {"count": self._problems[0], "first": self._problems[1]},
                "trouble": self._trouble,
            }

    def timeline(self, series: str) -> bytes:
        """A series of history.SERIES, packed: values [column][rank]. KeyError for a name that is none."""
        with self.lock:
            line = self.history.timeline(series)
        head = {"series": series, "num_ranks": self.num_ranks, "first": line.first_C, "last": line.last_C}
        return pack(head, line.values_CN)

    def rank(self, rank: int) -> dict[str, Any]:
        with self.lock:
            return self.history.rank(rank)

    def experts(self, number: int | None) -> dict[str, Any]:
        """Load, placement and migrations. number: of the window; None: of the newest that tells."""
        windows = self.history.windows() if number is None else [number]
        notes: list[str] = []
        view = next(filter(None, (expert_view.from_records(self.records(w)) for w in windows[-1:])), None)
        if view is None:
            view, notes = self.outside_experts()
        with self.lock:
            moves = self.history.migrations.to_json()
        if view is None and not notes:
            notes = ["expert load and placement: not recorded"]
        return {"schema": "eprt.experts/1", "experts": view, "migrations": moves, "notes": notes}
