"""Early ranks: a rank that the others hardly wait for waits long for everybody. It is faster, or has less to do.

It is no fault, and nobody is blamed for it. Judges a row together with its column.
"""

from dataclasses import asdict, dataclass
from typing import Any

from .sightings import Sighting
from .yardstick import Yardstick

EARLY_COLUMN = 0.8  # of the usual wait for the rank
FEWER_TOKENS = 0.8


@dataclass(frozen=True)
class EarlyRank:
    """As `early` of eprt.findings/1 has it."""

    rank: int
    ratio: float  # how long the others wait for it, over the usual
    waits_ratio: float  # how long it waits for them
    compute_ratio: float  # its time in the experts, over the median rank's
    first_window: int
    last_window: int
    evidence: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def is_early(row: Sighting, yardstick: Yardstick) -> bool:
    """row: of a sighting of kind "row"."""
    return row.place.kind == "row" and yardstick.column_ratio(row) <= EARLY_COLUMN


def early_rank(row: Sighting, yardstick: Yardstick) -> EarlyRank:
    assert row.place.rank is not None
    matrices = yardstick.matrices
    awaited, compute, tokens = yardstick.column_ratio(row), yardstick.compute(row), yardstick.tokens(row)
    why = "it has less to do" if tokens <= FEWER_TOKENS else "it is faster than its peers"
    return EarlyRank(
        rank=row.place.rank,
        ratio=round(awaited, 2),
        waits_ratio=round(row.ratio, 2),
        compute_ratio=round(compute, 2),
        first_window=int(matrices.window_W[row.first]),
        last_window=int(matrices.last_window_W[row.last]),
        evidence=f"rank {row.place.rank} is early: the others wait {awaited:.2g}x as long for it as for its peers, and "
        f"it waits {row.ratio:.2g}x as long for them; of the usual, it computes {compute:.2g}x for {tokens:.2g}x the "
        f"tokens: {why}. Not a fault",
    )
