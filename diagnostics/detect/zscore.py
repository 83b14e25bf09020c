"""The plain z-score, as other tools have it: distance from the mean in standard deviations. Only to compare with.

A faulty rank shifts mean and deviation too: among N ranks no column can pass sqrt(N - 1), which is 3 at N = 10.
"""

from collections.abc import Iterator

import numpy as np

from ..windows.matrices import WindowMatrices
from .runs import WindowRun
from .sightings import Outliers, Sighting, sightings_of

MIN_Z = 3.0


def detect(matrices: WindowMatrices, *_unused: object) -> tuple[Outliers, list[Sighting]]:
    wait_us_WNN = np.where(np.eye(matrices.num_ranks, dtype=bool), np.nan, matrices.wait_us_WNN)
    column = _distance(_mean(wait_us_WNN, 1))
    row = _distance(_mean(wait_us_WNN, 2))
    point = [part.reshape(wait_us_WNN.shape) for part in _distance(wait_us_WNN.reshape(len(wait_us_WNN), -1))]
    outliers = Outliers(*column, *row, *point)
    return outliers, list(sightings_of(outliers, _find_runs))


def _mean(values: np.ndarray, axis: int) -> np.ndarray:
    count = (~np.isnan(values)).sum(axis=axis)
    return np.where(count > 0, np.nansum(values, axis=axis) / np.maximum(count, 1), np.nan)


def _distance(values_WX: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(z, ratio) to the window's mean."""
    mean_W1 = _mean(values_WX, 1)[:, None]
    deviation_W1 = np.sqrt(_mean((values_WX - mean_W1) ** 2, 1))[:, None]
    with np.errstate(divide="ignore", invalid="ignore"):
        return (values_WX - mean_W1) / deviation_W1, values_WX / mean_W1


def _find_runs(z_WP: np.ndarray, ratio_WP: np.ndarray, is_point: bool) -> Iterator[tuple[WindowRun, float]]:
    """From the first to the last window in which the place is high; it must be in two, or in the only one."""
    high_WP = z_WP >= MIN_Z
    for place in np.flatnonzero(high_WP.sum(axis=0) >= min(2, len(z_WP))).tolist():
        seen = np.flatnonzero(high_WP[:, place])
        score, size = float(np.median(z_WP[seen, place])), float(np.median(ratio_WP[seen, place]))
        yield WindowRun(place, int(seen[0]), int(seen[-1]), score), size
