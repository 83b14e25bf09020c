"""ExpertLoad: what the experts of all ranks got in one window, and who held them. Knows one window, no history."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..log.events import ExpertRows


@dataclass(frozen=True, eq=False)
class ExpertLoad:
    """One window. L layers, P slots of all ranks (rank-major), E experts."""

    epoch: int  # of the placement
    layers_L: np.ndarray  # model layer numbers
    physical_to_logical_LP: np.ndarray  # expert of each slot, -1 for none
    slot_rows_LP: np.ndarray  # tokens each slot got
    load_LE: np.ndarray  # tokens each expert got
    rank_of_slot_P: np.ndarray  # who holds the slot

    @staticmethod
    def from_rows(rows_N: Sequence[ExpertRows | None]) -> "ExpertLoad | None":
        """rows_N: of each rank. None unless all ranks have rows of the same layers, with equally many slots in each."""
        known = [rows for rows in rows_N if rows is not None]
        layers = {rows.layers for rows in known}
        if len(known) < len(rows_N) or len(layers) != 1 or layers == {()}:
            return None
        if any(len(set(map(len, rows.rows))) > 1 for rows in known):
            return None
        expert_LP = np.concatenate([np.array(rows.expert_of_slot, dtype=np.int64) for rows in known], axis=1)
        rows_LP = np.concatenate([np.array(rows.rows, dtype=np.int64) for rows in known], axis=1)
        load_LE = np.zeros((len(expert_LP), int(expert_LP.max(initial=-1)) + 1), dtype=np.int64)
        for load_E, expert_P, rows_P in zip(load_LE, expert_LP, rows_LP):
            np.add.at(load_E, expert_P[expert_P >= 0], rows_P[expert_P >= 0])
        rank_P = np.repeat(np.arange(len(known)), [len(rows.rows[0]) for rows in known])
        epoch = max(rows.epoch for rows in known)
        return ExpertLoad(epoch, np.array(known[0].layers), expert_LP, rows_LP, load_LE, rank_P)

    def to_json(self) -> dict[str, Any]:
        """For the page."""
        return {
            "epoch": self.epoch,
            "layers": self.layers_L.tolist(),
            "rank_of_slot": self.rank_of_slot_P.tolist(),
            "expert_of_slot": self.physical_to_logical_LP.tolist(),
            "rows": self.slot_rows_LP.tolist(),
            "load": self.load_LE.tolist(),
        }
