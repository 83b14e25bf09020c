"""Medians over numpy arrays that ignore NaN. Knows nothing of waits."""

import numpy as np


def median(values: np.ndarray, axis: int) -> np.ndarray:
    """Median without NaN; NaN where there is nothing else. Much faster than numpy's."""
    ordered, count = _sort_known(values, axis)
    low = np.take_along_axis(ordered, np.maximum(0, (count - 1) // 2), axis)
    return np.squeeze((low + np.take_along_axis(ordered, count // 2, axis)) / 2, axis)


def low_median(values: np.ndarray, axis: int) -> np.ndarray:
    """The same, but the lower of two middle values: always one of the values."""
    ordered, count = _sort_known(values, axis)
    return np.squeeze(np.take_along_axis(ordered, np.maximum(0, (count - 1) // 2), axis), axis)


def median_of_known(values: np.ndarray) -> float:
    """Over all axes; 0 where nothing is known."""
    known = values[~np.isnan(values)]
    return float(np.median(known)) if known.size else 0.0


def _sort_known(values: np.ndarray, axis: int) -> tuple[np.ndarray, np.ndarray]:
    """Sorted with NaN last, and how many are not NaN."""
    return np.sort(values, axis=axis), np.sum(~np.isnan(values), axis=axis, keepdims=True)
