"""Mates: ranks of a late rank's node whose messages are late with it. Beside it they need less proof.

Noise hides most of a node's late ranks where it has few; but seldom is a healthy rank late by as much as its late
neighbour, in the same windows.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from .sightings import Sighting
from .yardstick import Yardstick

PART = 0.4  # of the late rank's longer messages: a mate's are longer by as much
STEADY = 0.9  # of the windows, in which they are longer than before
OWN_PART = 0.5  # of the late rank's lateness is its messages'


def fold_with_mates(
    sightings: list[Sighting], yardstick: Yardstick, fold: Callable[[list[Sighting]], list[Sighting]]
) -> list[Sighting]:
    """fold(): to nodes. Mates that it does not use are no findings."""
    mates = _find_mates(sightings, yardstick)
    known = {id(mate) for mate in mates}
    return [sighting for sighting in fold([*sightings, *mates]) if id(sighting) not in known]


def _find_mates(sightings: Sequence[Sighting], yardstick: Yardstick) -> list[Sighting]:
    columns, mates = [s for s in sightings if s.place.kind == "column"], []
    node_N = yardstick.matrices.node_of_rank_N
    for column in columns:
        rank, change = column.place.rank, yardstick.late_messages(column)
        if rank is None or change is None:
            continue
        late_us_N, message_us_N, longer_N = change
        if not message_us_N[rank] >= OWN_PART * late_us_N[rank] > 0:
            continue
        is_mate_N = (node_N == node_N[rank]) & (message_us_N >= PART * message_us_N[rank]) & (longer_N >= STEADY)
        taken = {other.place.rank for other in columns if other.overlaps(column)}
        for mate in np.flatnonzero(is_mate_N).tolist():
            if mate not in taken:
                mates.append(replace(column, place=column.place._replace(rank=mate), is_change=True))
    return mates
