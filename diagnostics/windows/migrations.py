"""Migrations: which expert slots changed their expert, and in which window. Knows nothing of their load."""

from typing import Any

from ..log.events import ExpertRows, WindowRecord
from ..log.window_ranges import WindowRanges

_MOST_MOVES = 2000  # kept, the newest


class Migrations:
    """Seen in the log, record by record."""

    def __init__(self):
        self._windows: dict[int, WindowRanges] = {}  # rank -> windows that have its rows
        self._last: dict[int, tuple[int, ExpertRows]] = {}  # rank -> its newest window that has rows, and the rows
        self._moves: list[dict[str, int]] = []
        self._total = 0

    def add_record(self, record: WindowRecord) -> None:
        table, before = record.experts, self._last.get(record.rank)
        if table is None:
            return
        self._windows.setdefault(record.rank, WindowRanges()).add_window(record.window)
        if before is not None and before[0] >= record.window:
            return
        self._last[record.rank] = record.window, table
        if before is None or before[1].expert_of_slot == table.expert_of_slot or before[1].layers != table.layers:
            return
        when = {"window": record.window, "epoch": table.epoch}
        for layer, old, new in zip(table.layers, before[1].expert_of_slot, table.expert_of_slot):
            for slot, (was, now) in enumerate(zip(old, new)):
                if was != now:
                    self._total += 1
                    where = {"layer": layer, "rank": record.rank, "slot": slot}
                    self._moves.append({**when, **where, "before": was, "after": now})
        del self._moves[:-_MOST_MOVES]

    def newest_window(self, num_ranks: int) -> int | None:
        """The newest window that has the rows of all ranks, if there is one."""
        if len(self._windows) < num_ranks:
            return None
        window, before = min(ranges.last for ranges in self._windows.values()), None
        while window != before:  # steps back until all ranks have the same one
            window, before = min(ranges.last_until(window) for ranges in self._windows.values()), window
        return window if window >= 0 else None

    def to_json(self) -> dict[str, Any]:
        """moves: the newest first."""
        return {"total": self._total, "moves": self._moves[::-1]}
