"""Early ranks: a rank that the others hardly wait for waits long for everybody. It is faster, or has less to do.

It is no fault, and nobody is blamed for it. Judges a row together with its column.
"""

from dataclasses import asdict, dataclass, replace
from typing import Any

from .sightings import Place, Sighting
from .yardstick import Yardstick

EARLY_COLUMN = 0.7  # of the usual wait for the rank, among its peers or in its own past
QUICK_COMPUTE = 0.8  # of the usual time in the experts: a rank that waits and computes so little is early
WORKS_LESS = 0.5  # of a longer wait that the rank's own shorter work makes up: it came so much earlier
FEW_RANKS, LARGER = (
    8,
    1.25,
)  # among fewer ranks, an early one moves what is usual; what is so much larger is not its echo
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


def split_early(sightings: list[Sighting], yardstick: Yardstick) -> tuple[list[Sighting], list[Sighting]]:
    """Rows of early ranks, and the other sightings without what only echoes them."""
    early = [row for s in sightings if (row := _early_row(s, yardstick)) is not None]
    num_ranks = yardstick.matrices.num_ranks

    def is_echo(s: Sighting) -> bool:
        mine = [row for row in early if row.overlaps(s)]
        if any(row.place.rank in (s.place.src, s.place.rank) and s.place.kind != "column" for row in mine):
            return True
        return num_ranks < FEW_RANKS and any(s.ratio < LARGER * row.ratio for row in mine)

    ranks = {row.place.rank: row for row in sorted(early, key=lambda row: row.score)}
    return list(ranks.values()), [s for s in sightings if not is_echo(s)]


def _early_row(sighting: Sighting, yardstick: Yardstick) -> Sighting | None:
    """The row, also of a link that its waiting rank explains."""
    kind, src = sighting.place.kind, sighting.place.src
    if kind == "column":
        return None
    row = sighting if kind == "row" else replace(sighting, place=Place("row", src, None, None))
    is_quick = yardstick.compute(row) <= QUICK_COMPUTE
    if kind == "row" and (is_quick or yardstick.works_less(row) >= WORKS_LESS):
        return row
    return row if yardstick.column_ratio(row) <= EARLY_COLUMN and (kind == "row" or is_quick) else None


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
