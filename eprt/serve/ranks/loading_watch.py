"""LoadingWatch: ranks that get no further before they are Ready, and so would keep the others waiting for ever.

Ranks that load together wait for each other, for as long as any of them reads or computes. So none is given up as long
as one of them gets on: has read more, used a core, begun or ended a wait, or become Ready. Knows nothing of how a rank
is given up.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from eprt.diagnostics.detect.hangs import find_culprits, hang_evidence
from eprt.serve.ranks.rank import Rank

LOOK_S = 0.5
_LATE_LOOK_S = 5.0  # this process itself was held up: messages may wait in its sockets


class LoadingWatch:
    """Of one pool.

    Args:
        timeout_s: for which none of the ranks may get on.
        lose: gives up a rank, or the number of one that has never connected; in which words, with which details.
    """

    def __init__(self, timeout_s: float, lose: Callable[[Rank | int, str, str], None]):
        self._timeout_s, self._lose = timeout_s, lose
        self._since_s = self._looked_s = time.monotonic()

    def look(self, start: Mapping[int, Rank | None] | None, joiners: Iterable[Rank]) -> None:
        """To be called now and then.

        start: the ranks that the server begins with, None for one that has not connected; None once all have loaded.
        joiners: ranks that load beside those that serve, each by itself.
        """
        now_s = time.monotonic()
        was_late, self._looked_s = now_s - self._looked_s > _LATE_LOOK_S, now_s
        if was_late:
            return
        if start is not None:
            self._look_at(start, now_s)
        for rank in list(joiners):
            self._look_at({rank.rank: rank}, now_s)

    def _look_at(self, ranks: Mapping[int, Rank | None], now_s: float) -> None:
        """Ranks that load together: gives one up where none gets on."""
        latest_s = max(self._since_s if rank is None else rank.progress_s for rank in ranks.values())
        if now_s - latest_s < self._timeout_s or all(rank and rank.info for rank in ranks.values()):
            return
        who, evidence = _culprit(ranks, now_s)
        during = "was not ready"
        if isinstance(who, Rank) and who.loading is not None:
            during += f" with {who.loading.num_bytes / 1e9:.1f} of {who.loading.num_total / 1e9:.1f} GB read"
        what = f"{during}, and no rank got any further for {now_s - latest_s:.0f} s (--load-timeout)"
        self._lose(who, what, evidence)


def _culprit(ranks: Mapping[int, Rank | None], now_s: float) -> tuple[Rank | int, str]:
    """Who to blame where nobody gets on, and who waits for it in which call."""
    there = {number: rank for number, rank in ranks.items() if rank is not None}
    standings = {
        number: replace(stood, state=state) if (state := rank.process_state()) else stood
        for number, rank in there.items()
        if (stood := rank.standing(now_s))
    }
    waits = "; ".join(
        f"rank {number} waits for rank {stood.waits_for} for {stood.waited_s:.1f} s in {stood.call}"
        for number, stood in standings.items()
        if stood.waits_for is not None
    )
    if absent := [number for number in ranks if number not in there]:
        return absent[0], "; ".join(filter(None, ("it has never connected", waits)))
    culprits = [culprit for culprit in find_culprits(standings) if there[culprit.rank].info is None]
    if culprits:  # first those for which others wait
        culprit = max(culprits, key=lambda each: (len(each.waiters), each.waited_s))
        return there[culprit.rank], hang_evidence(culprit, standings)
    loading = [number for number, rank in there.items() if rank.info is None]
    others = f"; so do ranks {', '.join(map(str, loading[1:]))}" if len(loading) > 1 else ""
    return there[loading[0]], f"its process is alive, uses no core and names no rank that it waits for{others}"
