"""Runs: in which consecutive windows a place stands out, and how surely. Knows z-scores, and no ranks or links.

A matched filter: how well does a step that begins with the run's first window and ends after its last one explain the
z-scores, given how noise persists (generalised least squares with the correlation of chance.py)? A run is thus compared
with the windows before and after it as far as noise lasts. A place's best run is the one with the highest score; its
first and last window are onset and recovery.
"""

import math
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from .chance import RAISED_Z, Chance, clipped

FALSE_ALARM_RATE = 2e-5  # per window, for all columns (rows, points) together, with normal noise


class WindowRun(NamedTuple):
    """Consecutive windows in which a place stands out."""

    place: int  # index
    first: int  # position of the first window
    last: int  # of the last, included
    score: float


def least_score(num_places: int) -> float:
    """The score that the largest of num_places normal scores reaches with FALSE_ALARM_RATE."""
    return NormalDist().inv_cdf(1 - FALSE_ALARM_RATE / num_places)


def find_best_runs(z_WP: np.ndarray, chance: Chance, min_score: float, every_place: bool = False) -> list[WindowRun]:
    """Every place's best run, if it reaches min_score. A window without data speaks against a run, weakly.
    every_place: also of those that never stand out by themselves."""
    num_windows = len(z_WP)
    places = np.flatnonzero(every_place | (z_WP >= RAISED_Z).any(axis=0))
    z_WP = clipped(z_WP[:, places])
    inverse_WW = np.linalg.inv(chance.covariance(num_windows))
    sums_WP = _running_sums(inverse_WW @ z_WP)
    sums_WW = _running_sums(_running_sums(inverse_WW).T)
    score_P, first_P, length_P = np.full(len(places), -np.inf), *np.zeros((2, len(places)), dtype=int)
    for length in range(1, num_windows + 1):
        begin = np.arange(num_windows - length + 1)
        end = begin + length
        norm_B = sums_WW[end, end] - sums_WW[begin, end] - sums_WW[end, begin] + sums_WW[begin, begin]
        score_BP = (sums_WP[end] - sums_WP[begin]) / np.sqrt(norm_B * chance.tail)[:, None]
        begin_P = score_BP.argmax(axis=0)
        top_P = np.take_along_axis(score_BP, begin_P[None], 0)[0]
        better = top_P > score_P
        score_P[better], first_P[better], length_P[better] = top_P[better], begin_P[better], length
    runs = []
    for p in np.flatnonzero(score_P >= min_score).tolist():
        at = slice(int(first_P[p]), int(first_P[p] + length_P[p]))
        score = float(score_P[p]) - _excess_of_top(z_WP[at, p], inverse_WW[at, at]) / math.sqrt(chance.tail)
        if score >= min_score:
            runs.append(WindowRun(int(places[p]), at.start, at.stop - 1, score))
    return runs


def _excess_of_top(z_W: np.ndarray, inverse_WW: np.ndarray) -> float:
    """What a run's largest window adds to its score beyond what the median window would."""
    top, weight_W = int(z_W.argmax()), inverse_WW.sum(axis=0)
    return float(max(0.0, weight_W[top]) * (z_W[top] - np.median(z_W)) / math.sqrt(weight_W.sum()))


def _running_sums(values: np.ndarray) -> np.ndarray:
    """Sums of the first 0, 1, ... rows."""
    return np.concatenate([np.zeros((1, values.shape[1])), values.cumsum(axis=0)])
