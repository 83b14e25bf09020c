"""HangWatch: which rank holds the others up now, from the ranks' heartbeats; no window need close for it.

Knows when a wait is too long, and nothing of windows, logs or messages.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from eprt.diagnostics.detect.hangs import Culprit, find_culprits, is_missing
from eprt.diagnostics.log.standing import Standing
from eprt.serve.ranks.heartbeat import BEAT_S
from eprt.serve.ranks.rank import Rank

LOOK_S = 0.25
# How long a rank may be waited for: while its heartbeat is missing; while it lives and uses no core; and while nobody
# waits for it, which on a crowded machine may be chance. One that has just loaded may be late with its first heartbeat
# up to the deadline of the ranks' waits.
_MISSING_S, _IDLE_S, _UNNOTICED_S = 1.5, 5.0, 5.0
_LATE_LOOK_S = 4 * LOOK_S  # this process itself was held up: heartbeats may wait in its sockets
_USUAL = 3  # a rank that computes may take so many times as long as one ever did
_OF_DEADLINE = 0.6  # but is named before the others give it up


@dataclass(frozen=True)
class Hang:
    """One rank, or a circle of ranks, that holds the others up."""

    culprit: Culprit
    since_s: float  # Unix time
    first_window: int  # that was under way when it was noticed


class HangWatch:
    """Of one server's ranks.

    Args:
        window_s: of the diagnosis: a rank that computes may take as long.
        deadline_s: of the ranks' waits.
    """

    def __init__(self, window_s: float, deadline_s: float):
        self._window_s, self._deadline_s = window_s, deadline_s
        self._looked_s: float | None = None  # time.monotonic() of the latest look
        self._not_before_s = 0.0
        self._longest_s = 0.0  # for which a rank that computed was waited for and came
        self._awaited_s: dict[tuple[int, ...], float] = {}  # in the latest look: culprit -> how long
        self._begins: set[int] = set()  # ranks without a heartbeat so far
        self.hangs: tuple[Hang, ...] = ()  # that last, in rank order
        self.standings: Mapping[int, Standing] = {}  # of all ranks, at the latest look

    def look(self, ranks: Sequence[Rank], window: int) -> bool:
        """Looks at the ranks that take part; whether a hang has begun or ended. window: the one under way."""
        now_s = time.monotonic()
        if self._looked_s is not None and now_s - self._looked_s > _LATE_LOOK_S:
            self._not_before_s = now_s + 2 * BEAT_S  # let the heartbeats come in first
        self._looked_s = now_s
        if now_s < self._not_before_s:
            return False
        standings = {rank.rank: rank.standing(now_s) for rank in ranks}
        self._begins = {rank.rank for rank in ranks if rank.beat is None}
        culprits = find_culprits(standings)
        for rank in ranks:  # what the kernel says is looked up of those only that may be to blame
            if any(rank.rank in culprit.ranks for culprit in culprits) and (state := rank.process_state()):
                standings[rank.rank] = replace(standings[rank.rank], state=state)
        self._learn(culprits, standings)
        known = {hang.culprit.ranks: hang for hang in self.hangs}
        hangs = tuple(
            _hang(culprit, standings, known.get(culprit.ranks), window)
            for culprit in culprits
            if self._lasts_too_long(culprit, standings)
        )
        self.hangs, self.standings = hangs, standings
        return {hang.culprit.ranks for hang in hangs} != set(known)

    def culprit_of(self, rank: int) -> int:
        """The rank that a rank, which others wait for, waits for itself, if a hang is known; else the rank."""
        for hang in self.hangs:
            if rank in (*hang.culprit.ranks, *hang.culprit.waiters):
                return hang.culprit.rank
        return rank

    def forget(self) -> None:
        """Other ranks take part from now on."""
        self.hangs, self.standings, self._looked_s, self._awaited_s = (), {}, None, {}

    def _learn(self, culprits: list[Culprit], standings: Mapping[int, Standing]) -> None:
        """Remembers how long ranks that compute let others wait, and came in the end."""
        now_s = {culprit.ranks: culprit.waited_s for culprit in culprits}
        for ranks, waited_s in self._awaited_s.items():
            if now_s.get(ranks, 0.0) < waited_s:
                self._longest_s = max(self._longest_s, waited_s)
        self._awaited_s = {
            culprit.ranks: culprit.waited_s
            for culprit in culprits
            if (stood := standings.get(culprit.rank)) is not None and stood.state == "computes"
        }

    def _lasts_too_long(self, culprit: Culprit, standings: Mapping[int, Standing]) -> bool:
        stood = standings.get(culprit.rank)
        if stood is None:  # the rank takes no part any more
            return False
        if culprit.first is None:
            return stood.heard_s >= (self._deadline_s if culprit.rank in self._begins else _UNNOTICED_S)
        if not culprit.is_circle and is_missing(stood):
            return culprit.waited_s >= _MISSING_S
        if stood.state == "computes":
            patience_s = min(max(self._window_s, _USUAL * self._longest_s), _OF_DEADLINE * self._deadline_s)
            return culprit.waited_s >= patience_s
        return culprit.waited_s >= min(_IDLE_S, _OF_DEADLINE * self._deadline_s)


def _hang(culprit: Culprit, standings: Mapping[int, Standing], known: Hang | None, window: int) -> Hang:
    since_s = time.time() - max(culprit.waited_s, standings[culprit.rank].heard_s - BEAT_S)
    if known is None:
        return Hang(culprit, since_s, window)
    return Hang(culprit, min(since_s, known.since_s), known.first_window)
