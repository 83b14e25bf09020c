"""Migrations: which expert slots changed their expert, and in which window. Knows nothing of their load."""

from typing import Any

from ..log.events import ExpertRows, WindowRecord

_MOST_MOVES = 2000  # kept, the newest


class Migrations:
    """Seen in the log, record by record."""

    def __init__(self):
        self._last: dict[int, tuple[int, ExpertRows]] = {}  # rank -> its newest window that has rows, and the rows
        self._moves: list[dict[str, int]] = []
        self._total = 0

    def add_record(self, record: WindowRecord) -> None:
        table, before = record.experts, self._last.get(record.rank)
        if table is None or (before is not None and before[0] >= record.window):
            return
        self._last[record.rank] = record.window, table
        if before is None or before[1].expert_of_slot == table.expert_of_slot or before[1].layers != table.layers:
            return
        for layer, old, new in zip(table.layers, before[1].expert_of_slot, table.expert_of_slot):
            for slot, (was, now) in enumerate(zip(old, new)):
                if was != now:
                    self._total += 1
                    self._moves.append(
                        {
                            "window": record.window,
                            "epoch": table.epoch,
                            "layer": layer,
                            "rank": record.rank,
                            "slot": slot,
                            "before": was,
                            "after": now,
                        }
                    )
        del self._moves[:-_MOST_MOVES]

    def newest_window(self, num_ranks: int) -> int | None:
        """The newest window that has the rows of all ranks; None: some rank never had any."""
        return min(window for window, _ in self._last.values()) if len(self._last) == num_ranks else None

    def to_json(self) -> dict[str, Any]:
        """moves: the newest first."""
        return {"total": self._total, "moves": self._moves[::-1]}
