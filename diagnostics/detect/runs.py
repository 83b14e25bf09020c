"""Runs: in which consecutive windows a place stands out, and how surely.

A matched filter: how well does a step that begins with the run's first window and ends after its last explain what is
seen, given how noise persists (generalised least squares with the correlation of chance.py)? What a run stands out by
is so measured against the windows before and after it as far as noise lasts. A place's best run is the one with the
highest score; where it begins and ends are onset and recovery.
"""

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from .chance import RAISED_Z, Chance, clipped

FALSE_ALARM_RATE = 2e-5  # per window, for all columns (rows, points) together, with normal noise


class Run(NamedTuple):
    """place: index. first, last: positions of windows, both included."""

    place: int
    first: int
    last: int
    score: float


def threshold(num_places: int) -> float:
    """The score that the largest of num_places normal scores reaches with FALSE_ALARM_RATE."""
    return NormalDist().inv_cdf(1 - FALSE_ALARM_RATE / num_places)


def best_runs(z_WP: np.ndarray, chance: Chance, min_score: float) -> list[Run]:
    """Every place's best run, if it reaches min_score. A window without data speaks against a run, weakly."""
    num_windows = len(z_WP)
    places = np.flatnonzero((z_WP >= RAISED_Z).any(axis=0))
    z_WP = clipped(z_WP[:, places])
    inverse_WW = np.linalg.inv(chance.memory.correlation(num_windows))
    sums_WP = _summed(inverse_WW @ z_WP)
    sums_WW = _summed(_summed(inverse_WW).T)
    best = _Best.of(len(places))
    for length in range(1, num_windows + 1):
        begin = np.arange(num_windows - length + 1)
        end = begin + length
        norm_B = sums_WW[end, end] - sums_WW[begin, end] - sums_WW[end, begin] + sums_WW[begin, begin]
        best.offer((sums_WP[end] - sums_WP[begin]) / np.sqrt(norm_B * chance.tail)[:, None], length)
    runs = []
    for p in np.flatnonzero(best.score_P >= min_score).tolist():
        at = slice(int(best.first_P[p]), int(best.first_P[p] + best.length_P[p]))
        score = float(best.score_P[p]) - _of_one_window(z_WP[at, p], inverse_WW[at, at]) / math.sqrt(chance.tail)
        if score >= min_score:
            runs.append(Run(int(places[p]), at.start, at.stop - 1, score))
    return runs


def _of_one_window(z_W: np.ndarray, inverse_WW: np.ndarray) -> float:
    """What a run's highest window adds to its score beyond what its middle one would."""
    top, weight_W = int(z_W.argmax()), inverse_WW.sum(axis=0)
    return float(max(0.0, weight_W[top]) * (z_W[top] - np.median(z_W)) / math.sqrt(weight_W.sum()))


def _summed(values: np.ndarray) -> np.ndarray:
    """Sums of the first 0, 1, ... rows."""
    return np.concatenate([np.zeros((1, values.shape[1])), values.cumsum(axis=0)])


@dataclass(eq=False)
class _Best:
    """The best run so far of each place."""

    score_P: np.ndarray
    first_P: np.ndarray
    length_P: np.ndarray

    @staticmethod
    def of(num_places: int) -> "_Best":
        return _Best(np.full(num_places, -np.inf), np.zeros(num_places, int), np.zeros(num_places, int))

    def offer(self, score_BP: np.ndarray, length: int) -> None:
        first_P = score_BP.argmax(axis=0)
        top_P = np.take_along_axis(score_BP, first_P[None], 0)[0]
        better = top_P > self.score_P
        self.score_P[better], self.first_P[better], self.length_P[better] = top_P[better], first_P[better], length
