"""Load of experts, their placement and its migrations, as one document for the page.

From the log lines of a window where they carry it (WindowRecord.experts), else from the replies of /v1/eprt/load and
/v1/eprt/placement, which may also lie beside a log as load.json and placement.json.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ..log.events import ExpertRows, WindowRecord

LOAD_FILE, PLACEMENT_FILE = "load.json", "placement.json"
_MOST_MOVES = 2000  # kept, the newest


def from_records(records: Iterable[WindowRecord]) -> dict[str, Any] | None:
    """None unless all ranks' lines carry expert rows of the same layers."""
    records = sorted(records, key=lambda record: record.rank)
    tables = [record.experts for record in records if record.experts is not None]
    if not tables or len(tables) < records[0].num_ranks or len({table.layers for table in tables}) > 1:
        return None
    layers = range(len(tables[0].layers))
    return {
        "source": f"window {records[0].window}",
        "epoch": max(table.epoch for table in tables),
        "layers": list(tables[0].layers),
        "rank_of_slot": [r for r, table in enumerate(tables) for _ in (table.rows[0] if table.rows else ())],
        "expert_of_slot": [[e for table in tables for e in table.expert_of_slot[layer]] for layer in layers],
        "rows": [[n for table in tables for n in table.rows[layer]] for layer in layers],
        "load": None,
    }


def from_replies(load: Any, placement: Any, source: str) -> dict[str, Any] | None:
    """load, placement: parsed replies, or None. ValueError when one is not of the expected form."""
    if load is None and placement is None:
        return None
    out: dict[str, Any] = {"source": source, "epoch": 0, "layers": [], "load": None, "rows": None}
    out.update({"rank_of_slot": None, "expert_of_slot": None})
    try:
        if load is not None:
            out["layers"] = [int(layer["layer"]) for layer in load["layers"]]
            out["load"] = [[int(n) for n in layer["per_expert"]] for layer in load["layers"]]
        if placement is not None:
            slots = [[int(e) for e in row] for row in placement["physical_to_logical_map"]]
            num_ranks = int(placement.get("num_ranks") or placement.get("num_gpus") or 0)
            num_slots = len(slots[0]) if slots else 0
            if num_ranks < 1 or num_slots % num_ranks:
                raise ValueError(f"{num_slots} slots do not divide among {num_ranks} ranks")
            out["layers"] = out["layers"] or list(placement.get("layers") or range(len(slots)))
            out["expert_of_slot"], out["epoch"] = slots, placement.get("epoch", 0)
            out["rank_of_slot"] = [slot * num_ranks // num_slots for slot in range(num_slots)]
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not the reply of /v1/eprt/load or /v1/eprt/placement: {error!r}") from None
    return out


def from_files(directory: Path) -> tuple[dict[str, Any] | None, list[str]]:
    """The document, and what is to be said about the files."""
    replies, notes = {}, []
    for name in (LOAD_FILE, PLACEMENT_FILE):
        try:
            replies[name] = json.loads((directory / name).read_text())
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as error:
            notes.append(f"{name} cannot be read: {error}")
    try:
        return from_replies(replies.get(LOAD_FILE), replies.get(PLACEMENT_FILE), " and ".join(replies)), notes
    except ValueError as error:
        return None, [*notes, f"{' and '.join(replies)}: {error}"]


class Migrations:
    """Which slots changed their expert, and when: seen in the log, line by line."""

    def __init__(self):
        self._last: dict[int, tuple[int, ExpertRows]] = {}  # rank -> window, its table
        self._moves: list[dict[str, int]] = []
        self.total = 0

    def add(self, record: WindowRecord) -> None:
        table, before = record.experts, self._last.get(record.rank)
        if table is None or (before is not None and before[0] >= record.window):
            return
        self._last[record.rank] = record.window, table
        if before is None or before[1].expert_of_slot == table.expert_of_slot or before[1].layers != table.layers:
            return
        for layer, old, new in zip(table.layers, before[1].expert_of_slot, table.expert_of_slot):
            for slot, (was, now) in enumerate(zip(old, new)):
                if was != now:
                    self.total += 1
                    self._moves.append(
                        {"window": record.window, "epoch": table.epoch, "layer": layer, "rank": record.rank,
                         "slot": slot, "before": was, "after": now}
                    )  # fmt: skip
        del self._moves[:-_MOST_MOVES]

    def to_json(self) -> Mapping[str, Any]:
        return {"total": self.total, "moves": self._moves[::-1]}
