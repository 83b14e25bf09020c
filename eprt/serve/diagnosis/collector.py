"""Collector: cuts the ranks' running totals into windows, and names the ranks that had nothing to report.

Ranks report totals since their start, so a late report loses nothing: the window in which it comes has all of it.
Knows nothing of what the windows mean (eprt.diagnostics).
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from eprt.diagnostics import ExpertRows, WindowRecord
from eprt.serve.ranks.messages import SlotTotals, WaitTotals

# A window lasts until some rank has made this many calls: an average over a few is mostly chance, and on a machine that
# barely progresses, chance can look like a slow rank.
MIN_CALLS = 16
_PER_RANK = ("dispatch_wait_us", "combine_wait_us", "recv_tokens", "sent_tokens")


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

    def close_window(self, totals: Mapping[int, WaitTotals], is_last: bool = False) -> Collected | None:
        """Ends a window with the latest totals of the ranks that have reported any. None: it has too few calls and goes
        on. Without any call it is empty and begins anew. is_last: end it however few calls it has."""
        now_s = time.time()
        num_calls = {rank: now.num_calls - self._before[rank].num_calls for rank, now in sorted(totals.items())}
        most_calls = max(num_calls.values(), default=0)
        if 0 < most_calls < MIN_CALLS and not is_last:
            return None
        records = tuple(self._record(rank, totals[rank], now_s) for rank, num in num_calls.items() if num > 0)
        if not records:
            self._since_s = dict.fromkeys(self._since_s, now_s)
            return Collected((), ())
        for record in records:
            self._before[record.rank], self._since_s[record.rank] = totals[record.rank], now_s
        self._window += 1
        return Collected(records, tuple(sorted(set(self._since_s) - {record.rank for record in records})))

    def skip_window(self, totals: Mapping[int, WaitTotals], taking_part: Sequence[int]) -> None:
        """The ranks have changed: what was counted since the latest window is of neither. Ranks that take no part are
        not silent, and a rank that has returned counts from 0."""
        now_s = time.time()
        self._since_s = dict.fromkeys(taking_part, now_s)
        for rank in self._before:
            self._before[rank] = totals.get(rank, self._nothing) if rank in self._since_s else self._nothing

    def _record(self, rank: int, now: WaitTotals, now_s: float) -> WindowRecord:
        before = self._before[rank]
        return WindowRecord(
            window=self._window,
            t_start=min(self._since_s[rank], now_s),  # a clock may have been set back
            t_end=now_s,
            rank=rank,
            num_ranks=len(self._node_of_rank),
            node_of_rank=self._node_of_rank,
            num_calls=now.num_calls - before.num_calls,
            compute_us=now.compute_us - before.compute_us,
            blocked_us=None if now.blocked_us is None else now.blocked_us - (before.blocked_us or 0.0),
            experts=self._experts(now.slots, before.slots),
            **{name: tuple(a - b for a, b in zip(getattr(now, name), getattr(before, name))) for name in _PER_RANK},
        )

    def _experts(self, now: SlotTotals | None, before: SlotTotals | None) -> ExpertRows | None:
        if now is None or len(now.rows) != len(self._layers):
            return None
        rows = now.rows
        if before is not None:
            rows = [[a - b for a, b in zip(new, old)] for new, old in zip(now.rows, before.rows)]
        return ExpertRows(now.epoch, self._layers, tuple(map(tuple, now.expert_of_slot)), tuple(map(tuple, rows)))
