"""Lateness: by how many microseconds a rank is later than usual, in itself or with its messages.

A late rank adds the same time to all waits for it, on short links and long ones. So lateness is a sum where effects.py
has products: waits minus what is usual on each link, split by medians. It says how a place changes within a run, and
nothing about the level at which it began. Knows no faults.
"""

from dataclasses import dataclass

import numpy as np

from ..windows.medians import median, median_of_known
from .effects import FLOOR_US, deviation_of_changes
from .runs import WindowRun

_ROUNDS = 2  # of the median polish
_PARTS = (0.0, 0.25, 0.5, 0.75, 1.0)


@dataclass(frozen=True, eq=False)
class Lateness:
    """W windows, N ranks; microseconds beyond the usual ones, beside those of the other ranks in the same window."""

    column_us_WN: np.ndarray  # what all others wait longer for the rank
    row_us_WN: np.ndarray  # what it waits longer for them
    # What its messages take longer: column and row together. A rank that is late is waited for as much longer as it
    # waits less, so its own lateness, and what it inherits from others, cancel. Where single messages are very late,
    # their receiver can wait for nobody by as much less: there the longest of its waits is what it inherits.
    messages_us_WN: np.ndarray
    awaited_us_WN: np.ndarray  # mean wait for the rank
    waiting_us_WN: np.ndarray  # mean wait of the rank
    usual_us: float  # wait

    @staticmethod
    def from_waits(dispatch_us_WNN: np.ndarray, combine_us_WNN: np.ndarray) -> "Lateness":
        single_WN = sum(_largest(_split(phase_us_WNN)[-1]) for phase_us_WNN in (dispatch_us_WNN, combine_us_WNN))
        wait_us_WNN = dispatch_us_WNN + combine_us_WNN
        usual_NN, column_WN, row_WN, left_WNN = _split(wait_us_WNN)
        column_WN, mean_row_WN = _beside_others(column_WN), _beside_others(row_WN + _mean_of_known(left_WNN, 2))
        del left_WNN  # as large as all waits
        return Lateness(
            column_WN,
            _beside_others(row_WN),
            _calmest(_beside_others(column_WN + mean_row_WN), _beside_others(column_WN + row_WN - single_WN)),
            _mean_of_known(wait_us_WNN, 1),
            _mean_of_known(wait_us_WNN, 2),
            max(FLOOR_US, median_of_known(usual_NN)),
        )

    def ratio(self, usual_us_WN: np.ndarray, run: WindowRun, change: float) -> float:
        """What a change by so many usual waits makes of the place's waits before the run."""
        before_us = median_of_known(usual_us_WN[: run.first, run.place])
        return float(1 + change * self.usual_us / max(FLOOR_US, before_us))


@dataclass(frozen=True, eq=False)
class LinkLateness:
    """P links; what is left of each beyond the lateness of its sender and the waiting of its receiver."""

    late_WP: np.ndarray  # in deviations of the links of its tier
    scale_us_P: np.ndarray  # these
    wait_us_WP: np.ndarray

    @staticmethod
    def from_waits(wait_us_WNN: np.ndarray, tier_NN: np.ndarray, pairs_P2: np.ndarray) -> "LinkLateness":
        left_WNN, (i_P, j_P) = _split(wait_us_WNN)[-1], pairs_P2.T
        scale_us_NN = np.full(tier_NN.shape, FLOOR_US)
        for tier in np.unique(tier_NN[tier_NN >= 0]):
            changes = np.abs(np.diff(left_WNN[:, tier_NN == tier], axis=0))
            # Where the median polish leaves exact zeros, nothing changes.
            scale_us_NN[tier_NN == tier] = max(FLOOR_US, deviation_of_changes(changes[changes > 0]))
        return LinkLateness(
            left_WNN[:, i_P, j_P] / scale_us_NN[i_P, j_P], scale_us_NN[i_P, j_P], wait_us_WNN[:, i_P, j_P]
        )

    def ratio(self, run: WindowRun, change: float) -> float:
        """What a change by so many deviations makes of the link's waits before the run."""
        before_us = median_of_known(self.wait_us_WP[: run.first, run.place])
        return float(1 + change * self.scale_us_P[run.place] / max(FLOOR_US, before_us))


def spared_us(blocked_us_WN: np.ndarray) -> np.ndarray:
    """How much less each rank waits at all than the others. All calls take equally long, so a rank that waits less
    works longer; this knows nothing of messages and their noise."""
    return median(blocked_us_WN, 1)[:, None] - blocked_us_WN


def _split(wait_us_WNN: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Usual waits [N, N]; and beyond them the columns, the rows, and what is left of each link."""
    usual_NN = median(wait_us_WNN, 0)
    np.fill_diagonal(usual_NN, np.nan)
    left_WNN = wait_us_WNN - usual_NN
    column_WN, row_WN = np.zeros(left_WNN.shape[:2]), np.zeros(left_WNN.shape[:2])
    for _ in range(_ROUNDS):
        change_WN = median(left_WNN, 1)
        column_WN = column_WN + change_WN
        left_WNN -= np.nan_to_num(change_WN)[:, None, :]
        change_WN = median(left_WNN, 2)
        row_WN = row_WN + change_WN
        left_WNN -= np.nan_to_num(change_WN)[:, :, None]
    return usual_NN, column_WN, row_WN, left_WNN


def _calmest(first_WN: np.ndarray, second_WN: np.ndarray) -> np.ndarray:
    """Of both and what lies between them: that which changes least from window to window. Both show a fault alike."""
    parts = [first_WN + part * (second_WN - first_WN) for part in _PARTS]
    return min(parts, key=lambda values_WN: deviation_of_changes(np.abs(np.diff(values_WN, axis=0))))


def _beside_others(values_WN: np.ndarray) -> np.ndarray:
    return values_WN - median(values_WN, 1)[:, None]


def _largest(left_WNN: np.ndarray) -> np.ndarray:
    return np.where(np.isnan(left_WNN).all(axis=2), np.nan, np.nan_to_num(left_WNN, nan=-np.inf).max(axis=2))


def _mean_of_known(values_WNN: np.ndarray, axis: int) -> np.ndarray:
    count_WN = (~np.isnan(values_WNN)).sum(axis=axis)
    return np.where(count_WN > 0, np.nansum(values_WNN, axis=axis) / np.maximum(1, count_WN), np.nan)
