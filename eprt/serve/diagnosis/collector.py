"""Collector: cuts the ranks' running totals into windows, and names the ranks that had nothing to report.

Ranks report totals since their start, so a late report loses nothing: the window in which it comes has all of it.
Knows nothing of what the windows mean (eprt.diagnostics).
"""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from eprt.diagnostics import ExpertRows, WindowRecord
from eprt.diagnostics.log.standing import LoggedProcess, Standing
from eprt.serve.ranks.messages import SlotTotals, WaitTotals

# A window lasts until some rank has made this many calls: an average over a few is mostly chance, and on a machine that
# barely progresses, chance can look like a slow rank.
MIN_CALLS = 16


@dataclass(frozen=True)
class Collected:
    """One window."""

    records: tuple[WindowRecord, ...]  # of the ranks that made calls, in rank order
    silent: tuple[int, ...]  # ranks that reported no call while others did: they are late, stopped or gone


class Collector:
    """Makes windows. layers: model layer of each row of SlotTotals. since_s: Unix time when the first window began."""

    def __init__(
        self, node_of_rank: Sequence[int], layers: Sequence[int], first_window: int = 0, since_s: float | None = None
    ):
        self._node_of_rank, self._layers = tuple(node_of_rank), tuple(layers)
        self._window = first_window
        ranks = range(len(self._node_of_rank))
        zeros: list = [0] * len(ranks)
        self._nothing = WaitTotals(0, zeros, zeros, zeros, zeros, 0.0)
        self._before = dict.fromkeys(ranks, self._nothing)
        self._since_s = dict.fromkeys(ranks, time.time() if since_s is None else since_s)
        self.processes: Mapping[int, LoggedProcess] = {}  # by rank, as far as they are known

    def close_window(
        self,
        totals: Mapping[int, WaitTotals],
        is_last: bool = False,
        *,
        waiting: Mapping[int, Standing] | None = None,
        standings: Mapping[int, Standing] | None = None,
    ) -> Collected | None:
        """Ends a window with the latest totals of the ranks that have reported any. None: it has too few calls and goes
        on, or it has none while ranks wait. Without any call and any wait it is empty and begins anew.

        is_last: end it however few calls it has.
        waiting: the ranks that wait for another now, for so long that it is in no total yet: it belongs to this window.
        standings: while a rank keeps the others waiting, where all ranks stand: the window ends, with a record of each.
        """
        now_s = time.time()
        waiting = waiting or {}
        totals = {rank: _with_wait(now, waiting.get(rank)) for rank, now in totals.items()}
        num_calls = {rank: now.num_calls - self._before[rank].num_calls for rank, now in sorted(totals.items())}
        most_calls = max(num_calls.values(), default=0)
        ends = is_last or standings is not None
        if (0 < most_calls < MIN_CALLS or (most_calls == 0 and waiting)) and not ends:
            return None
        told = {rank: totals.get(rank, self._before[rank]) for rank in standings or () if rank in self._before}
        told |= {rank: totals[rank] for rank, num in num_calls.items() if num > 0}
        stood_of = standings or {}
        records = tuple(
            self._record(rank, now, now_s, stood_of.get(rank), rank in waiting) for rank, now in sorted(told.items())
        )
        if not records:
            self._since_s = dict.fromkeys(self._since_s, now_s)
            return Collected((), ())
        for record in records:
            self._before[record.rank], self._since_s[record.rank] = told[record.rank], now_s
        self._window += 1
        silent = set(self._since_s) - told.keys() if standings is None else set()
        return Collected(records, tuple(sorted(silent)))

    @property
    def window(self) -> int:
        """The number of the one under way."""
        return self._window

    def skip_window(self, totals: Mapping[int, WaitTotals], taking_part: Sequence[int]) -> None:
        """The ranks have changed: what was counted since the latest window is of neither. Ranks that take no part are
        not silent, and a rank that has returned counts from 0."""
        now_s = time.time()
        self._since_s = dict.fromkeys(taking_part, now_s)
        for rank in self._before:
            self._before[rank] = totals.get(rank, self._nothing) if rank in self._since_s else self._nothing

    def _record(self, rank: int, now: WaitTotals, now_s: float, stood: Standing | None, waits: bool) -> WindowRecord:
        """waits: the rank is in a wait that began before it told of it, maybe in the window before."""
        before, t_start = self._before[rank], min(self._since_s[rank], now_s)  # a clock may have been set back
        usage, used, most_us = now.usage, before.usage or {}, 1e6 * (now_s - t_start) if waits else math.inf
        blocked_us = None if now.blocked_us is None else _more(now.blocked_us, before.blocked_us or 0.0, most_us)
        return WindowRecord(
            window=self._window,
            t_start=t_start,
            t_end=now_s,
            rank=rank,
            num_ranks=len(self._node_of_rank),
            node_of_rank=self._node_of_rank,
            num_calls=now.num_calls - before.num_calls,
            dispatch_wait_us=_more_each(now.dispatch_wait_us, before.dispatch_wait_us, most_us),
            combine_wait_us=_more_each(now.combine_wait_us, before.combine_wait_us, most_us),
            recv_tokens=_more_each(now.recv_tokens, before.recv_tokens),
            sent_tokens=_more_each(now.sent_tokens, before.sent_tokens),
            compute_us=now.compute_us - before.compute_us,
            blocked_us=blocked_us,
            experts=self._experts(now.slots, before.slots),
            usage=usage and {name: _more(value, used.get(name, 0.0)) for name, value in usage.items()},
            process=self.processes.get(rank),
            standing=stood,
        )

    def _experts(self, now: SlotTotals | None, before: SlotTotals | None) -> ExpertRows | None:
        if now is None or len(now.rows) != len(self._layers):
            return None
        rows = now.rows
        if before is not None:
            rows = [[a - b for a, b in zip(new, old)] for new, old in zip(now.rows, before.rows)]
        return ExpertRows(now.epoch, self._layers, tuple(map(tuple, now.expert_of_slot)), tuple(map(tuple, rows)))


def _with_wait(totals: WaitTotals, stood: Standing | None) -> WaitTotals:
    """The totals as if the wait ended now."""
    if stood is None or stood.waits_for is None:
        return totals
    name = "combine_wait_us" if stood.call.startswith("combine") else "dispatch_wait_us"
    waits_us = list(getattr(totals, name))
    waits_us[stood.waits_for] += 1e6 * stood.waited_s
    blocked_us = None if totals.blocked_us is None else totals.blocked_us + 1e6 * stood.waited_s
    return msgspec.structs.replace(totals, **{name: waits_us}, blocked_us=blocked_us)


def _more(now: Any, before: Any, most: float = math.inf) -> Any:
    """A wait that was counted while it lasted may turn out shorter."""
    return max(0, min(now - before, most))


def _more_each(now: Sequence[Any], before: Sequence[Any], most: float = math.inf) -> tuple:
    return tuple(_more(a, b, most) for a, b in zip(now, before))
