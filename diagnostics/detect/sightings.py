"""Sightings: places of the wait matrices that stand out, and in which windows. Knows no cause and no words for them."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from .runs import WindowRun


class Place(NamedTuple):
    """What stands out: a "column" or "row" (of `rank`), a "point" (`src` waits for `dst`), a "node", a "path" between
    two of `nodes`, a `tier` of links, or the whole "job"."""

    kind: str
    rank: int | None
    src: int | None
    dst: int | None
    nodes: tuple[int, ...] = ()
    tier: str | None = None


@dataclass(frozen=True, eq=False)
class Sighting:
    """A place that stands out in a run of windows."""

    place: Place
    first: int  # position of its first window
    last: int
    score: float  # of the run
    ratio: float  # to the usual wait
    is_change: bool = False  # the usual wait is that of its own past, not that of its peers
    members: tuple[Place, ...] = ()  # the ranks, links and paths that it is made of, where it is wider than they

    def overlaps(self, other: "Sighting") -> bool:
        """In at least half of the shorter run."""
        shared = min(self.last, other.last) - max(self.first, other.first) + 1
        return 2 * shared >= min(self.last - self.first, other.last - other.first) + 1

    def is_seen_as(self, other: "Sighting") -> bool:
        """Whether the other is the same thing."""
        return self.place == other.place and self.overlaps(other)


@dataclass(frozen=True, eq=False)
class Outliers:
    """How far each place stands out in each window: z in standard errors, ratio of its wait to the usual one. NaN where
    there are no data (and on the diagonal of points)."""

    column_z_WN: np.ndarray  # everyone waits for the rank
    column_ratio_WN: np.ndarray
    row_z_WN: np.ndarray  # the rank waits for everyone
    row_ratio_WN: np.ndarray
    point_z_WNN: np.ndarray  # [w][i][j]: rank i waits for rank j longer than column and row explain
    point_ratio_WNN: np.ndarray

    def links(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The points as a list of P links: (src, dst) of each [P, 2], z [W, P], ratio [W, P]."""
        pairs_P2 = np.argwhere(~np.eye(self.column_z_WN.shape[1], dtype=bool))
        i, j = pairs_P2.T
        return pairs_P2, self.point_z_WNN[:, i, j], self.point_ratio_WNN[:, i, j]


def without_twins(sightings: list[Sighting]) -> list[Sighting]:
    """Of several that are the same thing, the first."""
    return [s for k, s in enumerate(sightings) if not any(s.is_seen_as(other) for other in sightings[:k])]


# (z_WP, ratio_WP, is_point) -> the runs of P places that are to be reported, with their ratio.
FindRuns = Callable[[np.ndarray, np.ndarray, bool], Iterator[tuple[WindowRun, float]]]


def sightings_of(outliers: Outliers, find_runs: FindRuns) -> Iterator[Sighting]:
    """Columns, then rows, then points."""
    columns, rows = (outliers.column_z_WN, outliers.column_ratio_WN), (outliers.row_z_WN, outliers.row_ratio_WN)
    for kind, of_ranks in (("column", columns), ("row", rows)):
        for run, ratio in find_runs(*of_ranks, False):
            yield Sighting(Place(kind, run.place, None, None), run.first, run.last, run.score, ratio)
    pairs_P2, z_WP, ratio_WP = outliers.links()
    for run, ratio in find_runs(z_WP, ratio_WP, True):
        src, dst = pairs_P2[run.place].tolist()
        yield Sighting(Place("point", None, src, dst), run.first, run.last, run.score, ratio)
