"""HangJudge: which ranks of a pool hang so that they are to be given up, and in whose words.

A rank that lets the others wait may compute for long, or may get no core on a crowded machine: it has a thread that
runs, or that wants to. One that hangs asleep (a lock that nobody opens, a debugger) has none, again and again. So the
second is given up soon; the first only where somebody has said how long is too long (--hang-timeout), else at the
deadline of the others' waits. Knows nothing of how a rank is given up.
"""

import statistics
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from eprt.diagnostics.detect.hangs import find_culprits, hang_evidence
from eprt.diagnostics.log.standing import Standing
from eprt.serve.ranks.rank import Rank

_LEAST_S, _STEPS = 1.0, 10  # a rank that hangs asleep is waited for as long, and for so many usual steps
_IDLE_S = 0.8  # in which every look must find it so
_MISSING_S = 1.5  # without a heartbeat: three of them
_CONFIRMED_S = 0.3  # after the first of these looks a heartbeat must still say that a rank waits for it
_LATE_LOOK_S = 1.0  # this process itself was held up: heartbeats may wait in its sockets


@dataclass(frozen=True)
class _Awaited:
    """A rank that is waited for."""

    seconds: float  # for how long
    evidence: str  # in words
    said_s: float  # time.monotonic() of the latest word that it is


class HangJudge:
    """Of one pool.

    Args:
        timeout_s: how long a rank is waited for, whatever it does; None: see above.
        sees_sleep: whether a rank without a thread that runs does nothing: it does not wait for a GPU.
    """

    def __init__(self, timeout_s: float | None, sees_sleep: bool):
        self._timeout_s, self._sees_sleep = timeout_s, sees_sleep
        self._steps_s: deque[float] = deque(maxlen=64)  # how long steps took, as ranks told at the latest looks
        self._looked_s = 0.0  # time.monotonic() of the latest look
        self._idle_s: dict[int, float] = {}  # by pid: since when every look has found it idle

    @property
    def patience_s(self) -> float:
        if self._timeout_s is not None:
            return self._timeout_s
        return max(_LEAST_S, _STEPS * statistics.median(self._steps_s)) if self._steps_s else _LEAST_S

    def look(self, ranks: Sequence[Rank], quiet_s: Mapping[int, float]) -> list[tuple[Rank, str]]:
        """Of the ranks that take part, those that hang, and how that shows. quiet_s: for how long ranks that have
        requests have said nothing."""
        now_s = time.monotonic()
        was_late, self._looked_s = now_s - self._looked_s > _LATE_LOOK_S, now_s
        self._steps_s.extend(rank.stats.last_step_s for rank in ranks if rank.stats is not None)
        standings = {rank.rank: rank.standing(now_s) for rank in ranks}
        awaited = _awaited(ranks, standings)
        if len(ranks) == 1:  # nobody waits for it but clients
            awaited = {
                number: _Awaited(quiet, f"it has said nothing for {quiet:.1f} s", now_s)
                for number, quiet in quiet_s.items()
            }
        suspects = [rank for rank in ranks if rank.rank in awaited]
        self._note_idle(suspects, now_s, forget=was_late)
        if was_late:
            return []
        patience_s = self.patience_s
        return [
            (rank, awaited[rank.rank].evidence)
            for rank in suspects
            if awaited[rank.rank].seconds >= patience_s
            and self._gives_up(rank, standings[rank.rank], awaited[rank.rank], now_s)
        ]

    def _note_idle(self, suspects: Sequence[Rank], now_s: float, forget: bool) -> None:
        before = {} if forget or not self._sees_sleep else self._idle_s
        self._idle_s = {r.pid: before.get(r.pid, now_s) for r in suspects if self._sees_sleep and r.is_idle}

    def _gives_up(self, rank: Rank, stood: Standing, awaited: _Awaited, now_s: float) -> bool:
        """Whether a rank that was waited for too long is the cause."""
        if self._timeout_s is not None:
            return True
        idle_s = self._idle_s.get(rank.pid, now_s)
        does_nothing = stood.state != "computes" or stood.heard_s >= _MISSING_S
        return does_nothing and now_s - idle_s >= _IDLE_S and awaited.said_s >= idle_s + _CONFIRMED_S


def _awaited(ranks: Sequence[Rank], standings: Mapping[int, Standing]) -> dict[int, _Awaited]:
    """By rank at the end of a chain of waits."""
    said_s = {rank.rank: rank.beat_s for rank in ranks}
    return {
        culprit.rank: _Awaited(culprit.waited_s, hang_evidence(culprit, standings), said_s[culprit.first])
        for culprit in find_culprits(standings)
        if culprit.first is not None and not culprit.is_circle
    }
