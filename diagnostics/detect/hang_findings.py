"""Hangs as findings: of a log, from where its ranks stood at the ends of windows; of a server, from what it sees now.

Knows nothing of how a hang is noticed (hangs.py).
"""

from collections.abc import Mapping
from dataclasses import dataclass

from ..log.standing import LoggedProcess, Standing
from ..windows.matrices import WindowMatrices
from .analysis import Finding
from .hangs import MISSED_S, Culprit, find_culprits, hang_advice, hang_cause, hang_evidence, is_missing

KIND = "hang"


@dataclass
class _Course:
    """A hang, window by window."""

    first_window: int
    last_window: int
    since_s: float
    last_seen_s: float
    culprit: Culprit  # as it stood last, like the following
    standings: Mapping[int, Standing]
    is_over: bool = False


def hang_finding(
    culprit: Culprit,
    standings: Mapping[int, Standing],
    processes: Mapping[int, LoggedProcess],
    windows: tuple[int, int],
) -> Finding:
    """windows: the first and the last."""
    src, dst = (culprit.ranks[0], culprit.ranks[1]) if culprit.is_circle else (None, None)
    return Finding(
        kind=KIND,
        rank=None if culprit.is_circle else culprit.rank,
        src=src,
        dst=dst,
        cause=hang_cause(culprit, standings),
        score=round(max(culprit.waited_s, standings[culprit.rank].heard_s), 2),
        ratio=0.0,
        first_window=windows[0],
        last_window=windows[1],
        confidence=1.0,
        evidence=hang_evidence(culprit, standings),
        advice=hang_advice(culprit, standings, processes),
    )


@dataclass(frozen=True)
class LoggedHang:
    """A hang of a log."""

    finding: Finding
    since_s: float  # Unix time
    until_s: float | None  # None: it lasted when the log ended


def logged_hangs(matrices: WindowMatrices) -> list[LoggedHang]:
    """In the order in which they began."""
    by_window: dict[int, dict[int, Standing]] = {}
    end_s: dict[int, float] = {}
    for (window, rank), (stood, t_end) in sorted(matrices.standings.items()):
        by_window.setdefault(window, {})[rank] = stood
        end_s[window] = max(end_s.get(window, 0.0), t_end)
    courses: list[_Course] = []
    for window, standings in by_window.items():
        _follow(courses, window, end_s[window], standings)
    newest = int(matrices.last_window_W[-1]) if len(matrices.last_window_W) else 0
    return [
        LoggedHang(
            hang_finding(c.culprit, c.standings, matrices.processes, (c.first_window, c.last_window)),
            c.since_s,
            c.last_seen_s if c.is_over or c.last_window < newest else None,
        )
        for c in courses
    ]


def _follow(courses: list[_Course], window: int, t_end: float, standings: Mapping[int, Standing]) -> None:
    culprits = {culprit.ranks: culprit for culprit in find_culprits(standings) if _holds_up(culprit, standings)}
    for course in courses:
        if course.is_over:
            continue
        culprit = culprits.pop(course.culprit.ranks, None)
        if culprit is None:  # the window in which it was over
            course.is_over, course.last_seen_s, course.last_window = True, t_end, window
        else:
            course.culprit, course.standings, course.last_window, course.last_seen_s = culprit, standings, window, t_end
    for culprit in culprits.values():
        since_s = t_end - max(culprit.waited_s, standings[culprit.rank].heard_s)
        courses.append(_Course(window, window, since_s, t_end, culprit, standings))


def _holds_up(culprit: Culprit, standings: Mapping[int, Standing]) -> bool:
    """A record has the waits of all ranks, also those that had just begun."""
    stood = standings.get(culprit.rank)
    return stood is not None and (culprit.waited_s >= MISSED_S or is_missing(stood))
