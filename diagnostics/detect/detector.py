"""Detectors: which columns, rows and points of the wait matrices stand out, and in which windows. Two to choose from.

"robust"  logarithms, medians per tier, runs over windows (effects.py, runs.py). What everything else here uses.
"zscore"  distance from the mean in standard deviations, as other tools do; kept for comparison. A faulty rank shifts
          mean and deviation too: among N ranks no column can pass sqrt(N - 1), which is 3 at N = 10.

With two or three ranks a median cannot tell a rank from its link; there only a rank that all others wait for, while it
waits for nobody, is reported.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ..windows.matrices import WindowMatrices
from .chance import CLIP_Z, HIGH_Z, RAISED_Z, Chance
from .effects import FLOOR_US, Effects, ratio
from .runs import Run, best_runs, threshold

METHODS = ("robust", "zscore")
MIN_RANKS_FOR_MEDIANS = 4
MIN_RANK_RATIO, MIN_POINT_RATIO = 1.5, 1.7  # over the whole run; less is not worth anybody's time
SHORT_POINT_RATIO = 1.0  # over the number of windows, added for points: a short run needs a larger one
BURST_Z, BURST_RATIO = 8.0, 4.0  # a rank that stands out so far is reported from a single window
ALONE_Z, ALONE_RATIO = 6.5, 2.5  # the same where the log has one window only
POINT_MARGIN = 0.5  # on top of a point's least score: how noise persists is itself an estimate
STEADY = 0.75  # of a run's windows are raised
MAX_RUNS = 5  # of one place, those that are too unsteady to be reported included
MIN_RATIO_OF_FEW, MIN_WAIT_US_OF_FEW = 3.0, 20.0  # with two or three ranks
PLAIN_Z = 3.0


class Place(NamedTuple):
    """What stands out: a "column" or "row" (of `rank`), or a "point" (`src` waits for `dst`)."""

    kind: str
    rank: int | None
    src: int | None
    dst: int | None


@dataclass(frozen=True, eq=False)
class Sighting:
    """A place that stands out from window position `first` to `last`. score: of the run. ratio: to the usual wait."""

    place: Place
    first: int
    last: int
    score: float
    ratio: float

    def overlaps(self, other: "Sighting") -> bool:
        """In at least half of the shorter run."""
        shared = min(self.last, other.last) - max(self.first, other.first) + 1
        return 2 * shared >= min(self.last - self.first, other.last - other.first) + 1


@dataclass(frozen=True, eq=False)
class Outliers:
    """How far each place stands out in each window: z in standard errors, ratio of its wait to the usual one.

    NaN where there are no data (and on the diagonal of points). Columns: everyone waits for the rank. Rows: the rank
    waits for everyone. Points: [w][i][j], rank i waits for rank j longer than column and row explain.
    """

    column_z_WN: np.ndarray
    column_ratio_WN: np.ndarray
    row_z_WN: np.ndarray
    row_ratio_WN: np.ndarray
    point_z_WNN: np.ndarray
    point_ratio_WNN: np.ndarray


def detect(matrices: WindowMatrices, method: str) -> tuple[Outliers, list[Sighting]]:
    if method not in METHODS:
        raise ValueError(f"method={method!r}: must be {' or '.join(METHODS)}")
    if method == "zscore":
        outliers = _plain(matrices)
        return outliers, list(_sightings(outliers, method))
    effects = Effects.of(matrices.wait_us_WNN, matrices.node_of_rank_N)
    outliers = Outliers(
        effects.column_WN / effects.rank_error_W1,
        ratio(effects.column_WN),
        effects.row_WN / effects.rank_error_W1,
        ratio(effects.row_WN),
        effects.point_WNN / effects.sigma_W1[:, :, None],
        ratio(effects.point_WNN),
    )
    if matrices.num_ranks < MIN_RANKS_FOR_MEDIANS:
        return outliers, list(_awaited_by_all(matrices.wait_us_WNN))
    return outliers, list(_sightings(outliers, method))


def _sightings(outliers: Outliers, method: str) -> Iterator[Sighting]:
    num_ranks = outliers.column_z_WN.shape[1]
    pairs = np.argwhere(~np.eye(num_ranks, dtype=bool))
    i, j = pairs.T
    point_z_WP, point_ratio_WP = outliers.point_z_WNN[:, i, j], outliers.point_ratio_WNN[:, i, j]
    chance = Chance.of(point_z_WP)
    runs_of = _plain_runs if method == "zscore" else _robust_runs
    for run, size in runs_of(outliers.column_z_WN, outliers.column_ratio_WN, chance, is_point=False):
        yield Sighting(Place("column", run.place, None, None), run.first, run.last, run.score, size)
    for run, size in runs_of(outliers.row_z_WN, outliers.row_ratio_WN, chance, is_point=False):
        yield Sighting(Place("row", run.place, None, None), run.first, run.last, run.score, size)
    for run, size in runs_of(point_z_WP, point_ratio_WP, chance, is_point=True):
        src, dst = pairs[run.place].tolist()
        yield Sighting(Place("point", None, src, dst), run.first, run.last, run.score, size)


def _robust_runs(z_WP: np.ndarray, ratio_WP: np.ndarray, chance: Chance, is_point: bool) -> Iterator[tuple[Run, float]]:
    """Runs that are sure and large enough, with their ratio."""
    num_windows, num_places = z_WP.shape
    min_score = threshold(num_places) + (POINT_MARGIN if is_point else 0.0)
    if not is_point:  # a median over the ranks has no tails, and follows no single link
        chance = Chance(chance.memory)
    left_WP = z_WP.copy()
    told_WP = np.zeros(z_WP.shape, dtype=bool)
    for _ in range(MAX_RUNS if num_windows > 1 else 0):
        runs = best_runs(left_WP, chance, min_score)
        for run in runs:
            at = slice(run.first, run.last + 1)
            size = float(np.nanmedian(ratio_WP[at, run.place]))
            length = run.last - run.first + 1
            min_ratio = MIN_POINT_RATIO + SHORT_POINT_RATIO / length if is_point else MIN_RANK_RATIO
            z_W = z_WP[at, run.place]
            is_raised_W = z_W >= RAISED_Z
            if np.mean(is_raised_W[~np.isnan(z_W)]) < STEADY and not is_point:
                left_WP[at, run.place] = np.where(is_raised_W, z_W, -CLIP_Z)  # perhaps two runs, with calm between
                continue
            left_WP[at, run.place] = -CLIP_Z  # it interrupts other runs
            enough = chance.is_enough(z_W, num_places, num_windows) if is_point else (z_W >= HIGH_Z).sum() >= 2
            if size >= min_ratio and enough and np.mean(is_raised_W[~np.isnan(z_W)]) >= STEADY:
                told_WP[at, run.place] = True
                yield run, size
        if not runs:
            break
    if not is_point:
        min_z, min_ratio = (BURST_Z, BURST_RATIO) if num_windows > 1 else (ALONE_Z, ALONE_RATIO)
        for w, place in np.argwhere((z_WP >= min_z) & (ratio_WP >= min_ratio) & ~told_WP).tolist():
            yield Run(place, w, w, float(z_WP[w, place])), float(ratio_WP[w, place])


def _awaited_by_all(wait_us_WNN: np.ndarray) -> Iterator[Sighting]:
    """The rule for two or three ranks: every other rank waits for it at least thrice as long as it waits for anyone.

    Without medians there is no scale either; a spread of 25 % per wait is assumed.
    """
    num_windows, num_ranks = wait_us_WNN.shape[:2]
    for rank in range(num_ranks if num_ranks > 1 else 0):
        others = np.arange(num_ranks) != rank
        awaited_W = wait_us_WNN[:, others, rank].min(axis=1)
        own_W = wait_us_WNN[:, rank, others].max(axis=1)
        ratio_W = (awaited_W + FLOOR_US) / (own_W + FLOOR_US)
        seen = np.flatnonzero((ratio_W >= MIN_RATIO_OF_FEW) & (awaited_W >= MIN_WAIT_US_OF_FEW))
        if len(seen) >= min(2, num_windows):
            size = float(np.median(ratio_W[seen]))
            score = math.log(size) / (0.25 * math.sqrt(2))
            yield Sighting(Place("column", rank, None, None), int(seen[0]), int(seen[-1]), score, size)


# ---- the plain z-score ----------------------------------------------------------------------------------------------


def _plain(matrices: WindowMatrices) -> Outliers:
    wait_us_WNN = np.where(np.eye(matrices.num_ranks, dtype=bool), np.nan, matrices.wait_us_WNN)
    if matrices.num_ranks == 1:
        empty_WN = np.full(wait_us_WNN.shape[:2], np.nan)
        return Outliers(empty_WN, empty_WN, empty_WN, empty_WN, wait_us_WNN, wait_us_WNN)
    column = _distance(_mean(wait_us_WNN, 1))
    row = _distance(_mean(wait_us_WNN, 2))
    point = [part.reshape(wait_us_WNN.shape) for part in _distance(wait_us_WNN.reshape(len(wait_us_WNN), -1))]
    return Outliers(*column, *row, *point)


def _mean(values: np.ndarray, axis: int) -> np.ndarray:
    count = (~np.isnan(values)).sum(axis=axis)
    return np.where(count > 0, np.nansum(values, axis=axis) / np.maximum(count, 1), np.nan)


def _distance(values_WX: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(z, ratio) to the window's mean."""
    mean_W1 = _mean(values_WX, 1)[:, None]
    deviation_W1 = np.sqrt(_mean((values_WX - mean_W1) ** 2, 1))[:, None]
    with np.errstate(divide="ignore", invalid="ignore"):
        return (values_WX - mean_W1) / deviation_W1, values_WX / mean_W1


def _plain_runs(z_WP: np.ndarray, ratio_WP: np.ndarray, chance: Chance, is_point: bool) -> Iterator[tuple[Run, float]]:
    high_WP = z_WP >= PLAIN_Z
    for place in np.flatnonzero(high_WP.sum(axis=0) >= min(2, len(z_WP))).tolist():
        seen = np.flatnonzero(high_WP[:, place])
        score, size = float(np.median(z_WP[seen, place])), float(np.median(ratio_WP[seen, place]))
        yield Run(place, int(seen[0]), int(seen[-1]), score), size
