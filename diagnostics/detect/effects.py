"""Effects: a window's waits taken apart into what each rank adds as awaited (column), as waiter (row), and what is left
of each link (point), in logarithms and with medians, so that a fault does not shift the yardstick it is measured by.

The logarithm is a started one, log(wait + a quarter of the usual wait): near zero a wait says "came first", and how
near is chance. Links inside a node are compared with each other, and so are links between nodes.
"""

import math
from dataclasses import dataclass

import numpy as np

START = 0.25  # of the tier's median wait, added before the logarithm
FLOOR_US = 1.0  # waits below the cost of looking are noise
MIN_SIGMA = 0.05  # a log calmer than 5 % is not believed
MIN_RANK_SIGMA = 0.05  # ranks differ by this much without being at fault
_ROUNDS = 3  # of Tukey's median polish; more change the third digit


@dataclass(frozen=True, eq=False)
class Effects:
    """W windows, N ranks, natural logarithms; NaN where there are no data and on the diagonal.

    sigma_W1: scale of what is left of a link. rank_error_W1: standard error of a column or row.
    """

    column_WN: np.ndarray
    row_WN: np.ndarray
    point_WNN: np.ndarray
    sigma_W1: np.ndarray
    rank_error_W1: np.ndarray

    @staticmethod
    def of(wait_us_WNN: np.ndarray, node_of_rank_N: np.ndarray) -> "Effects":
        num_ranks = len(node_of_rank_N)
        left_WNN = _started_logs(wait_us_WNN, node_of_rank_N)
        column_WN, row_WN = np.zeros(left_WNN.shape[:2]), np.zeros(left_WNN.shape[:2])
        for _ in range(_ROUNDS):
            change_WN = np.nan_to_num(low_median(left_WNN, 1))
            column_WN, left_WNN = column_WN + change_WN, left_WNN - change_WN[:, None, :]
            change_WN = np.nan_to_num(low_median(left_WNN, 2))
            row_WN, left_WNN = row_WN + change_WN, left_WNN - change_WN[:, :, None]
        silent_WN = np.isnan(left_WNN).all(axis=2)
        row_WN[silent_WN] = np.nan
        column_WN[np.isnan(left_WNN).all(axis=1)] = np.nan
        column_WN, row_WN = column_WN - median(column_WN, 1)[:, None], row_WN - median(row_WN, 1)[:, None]
        sigma_W1 = _scale(left_WNN)
        num_known_W1 = np.maximum(1, num_ranks - 1 - silent_WN.sum(axis=1, keepdims=True))
        # Of a median of n values, in the normal case; and what ranks differ by anyway.
        error_W1 = np.hypot(sigma_W1 * np.sqrt(math.pi / 2 / num_known_W1), MIN_RANK_SIGMA)
        return Effects(column_WN, row_WN, left_WNN, sigma_W1, error_W1)


def ratio(effect: np.ndarray) -> np.ndarray:
    """How many times the usual wait an effect makes of it."""
    return np.maximum(0.0, (1 + START) * np.exp(effect) - START)


def _started_logs(wait_us_WNN: np.ndarray, node_of_rank_N: np.ndarray) -> np.ndarray:
    """Less the median of their tier; NaN on the diagonal."""
    num_ranks = len(node_of_rank_N)
    off_diagonal = ~np.eye(num_ranks, dtype=bool)
    same_node = node_of_rank_N[:, None] == node_of_rank_N[None, :]
    out_WNN = np.full(wait_us_WNN.shape, np.nan)
    for tier in (same_node & off_diagonal, ~same_node):
        waits_WX = wait_us_WNN[:, tier]
        if not waits_WX.size:
            continue
        floor_W1 = FLOOR_US + START * np.nan_to_num(median(waits_WX, 1))[:, None]
        logs_WX = np.log(waits_WX + floor_W1)
        out_WNN[:, tier] = logs_WX - median(logs_WX, 1)[:, None]
    return out_WNN


def _scale(left_WNN: np.ndarray) -> np.ndarray:
    """Median absolute deviation as a standard deviation, half of it shared by all windows: one window has few links.

    The polish leaves exact zeros, one per rank and direction: they say nothing of the noise. Without them the scale is
    right within 7 % from 4 to 256 ranks (found by simulation with normal noise).
    """
    size_WX = np.abs(left_WNN).reshape(len(left_WNN), -1)
    deviation_W = median(np.where(size_WX < 1e-9, np.nan, size_WX), 1)
    shared_W = np.sqrt(np.nan_to_num(deviation_W) * np.nan_to_num(median(deviation_W, 0)))
    return np.maximum(MIN_SIGMA, 1.4826 * shared_W)[:, None]


def median(values: np.ndarray, axis: int) -> np.ndarray:
    """Median without NaN; NaN where there is nothing else. Much faster than numpy's."""
    ordered, count = _ordered(values, axis)
    low = np.take_along_axis(ordered, np.maximum(0, (count - 1) // 2), axis)
    high = np.take_along_axis(ordered, np.minimum(count // 2, values.shape[axis] - 1), axis)
    return np.squeeze(np.where(count > 0, (low + high) / 2, np.nan), axis)


def low_median(values: np.ndarray, axis: int) -> np.ndarray:
    """The same, but of two middle values the lower: always one of the values."""
    ordered, count = _ordered(values, axis)
    low = np.take_along_axis(ordered, np.maximum(0, (count - 1) // 2), axis)
    return np.squeeze(np.where(count > 0, low, np.nan), axis)


def _ordered(values: np.ndarray, axis: int) -> tuple[np.ndarray, np.ndarray]:
    """Sorted with NaN last, and how many are not NaN."""
    return np.sort(values, axis=axis), np.sum(~np.isnan(values), axis=axis, keepdims=True)
