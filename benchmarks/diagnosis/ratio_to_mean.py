"""The yardstick of the fault suite: what a detector by the ratio to the mean reports, as DeepXTrace does it.

Per window, a column (row) is reported when its mean is at least three times the mean of all columns' (rows') means, and
where no column and no row is, a point when it is five times the mean of all points: thresholds 3, 3 and 5 as shipped.
"""

from collections import Counter

import numpy as np

RANK_RATIO, POINT_RATIO = 3.0, 5.0


def places(wait_us_WNN: np.ndarray) -> list[tuple]:
    """(kind, rank, src, dst) of what is reported in at least two windows (or in the only one), the most often first."""
    counts: Counter = Counter()
    for wait_us_NN in wait_us_WNN:
        counts.update(_of_window(np.nan_to_num(wait_us_NN)))
    least = min(2, len(wait_us_WNN))
    return [place for place, count in counts.most_common() if count >= least]


def _of_window(wait_us_NN: np.ndarray) -> list[tuple]:
    column_N, row_N = wait_us_NN.mean(axis=0), wait_us_NN.mean(axis=1)
    columns = np.flatnonzero(column_N >= RANK_RATIO * column_N.mean())
    rows = np.flatnonzero(row_N >= RANK_RATIO * row_N.mean())
    if not wait_us_NN.any():
        return []
    if len(columns) or len(rows):
        return [("column", int(r), None, None) for r in columns] + [("row", int(r), None, None) for r in rows]
    points = np.argwhere(wait_us_NN >= POINT_RATIO * wait_us_NN.mean())
    return [("point", None, int(i), int(j)) for i, j in points]
