"""Runs: in which consecutive windows a place stands out, and how surely.

The score of a run is the sum of its windows' z over the standard deviation that such a sum has by chance. Chance is
taken from the log itself: noise that persists from window to window (autocorrelation) and noise with heavy tails both
widen it. A place's best run is the one with the highest score; where it begins and ends are onset and recovery.
"""

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

FALSE_ALARM_RATE = 2e-5  # per window, for all columns (rows, points) together, with normal noise
CLIP_Z = 5.0  # one window counts for no more: a burst in one window is no persistent fault
HIGH_Z, RAISED_Z = 3.5, 2.0
_QUIET, _QUIET_ENERGY = (
    0.95,
    0.93,
)  # share of links that are surely not at fault, and the variance of normal noise there
_LINKS_THAT_TELL = 16_384
_RUN_CHANCE = 3e-4  # that chance alone gives one run of so many high windows


class Run(NamedTuple):
    """place: index. first, last: positions of windows, both included."""

    place: int
    first: int
    last: int
    score: float


@dataclass(frozen=True, eq=False)
class Chance:
    """How the noise of a log adds up over windows. autocorrelation: from one window to the next, 0..1.

    tail: variance of clipped z over that of normal noise. high_rate: share of a link's windows that are high and alone,
    as noise is and a fault is not.
    """

    autocorrelation: float
    tail: float
    high_rate: float

    @staticmethod
    def of(z_WP: np.ndarray) -> "Chance":
        """z_WP: of the links. Of very many links some tell enough."""
        z_WP = z_WP[:, :: max(1, z_WP.shape[1] // _LINKS_THAT_TELL)]
        num_known = max(1, int((~np.isnan(z_WP)).sum()))
        floor = min(1e-3, 0.5 / num_known)
        if len(z_WP) < 3:
            return Chance(0.0, 1.0, floor)
        # A faulty link is among the loudest, which are left out; and however loud one is, its share is bounded.
        quiet_WP = np.clip(np.nan_to_num(z_WP), -RAISED_Z, RAISED_Z)
        energy_P = (quiet_WP**2).sum(axis=0)
        quiet_P = energy_P <= np.quantile(energy_P, _QUIET)
        products = (quiet_WP[1:, quiet_P] * quiet_WP[:-1, quiet_P]).mean()
        rho = min(0.95, max(0.0, float(products) / max(1e-9, float((quiet_WP[:, quiet_P] ** 2).mean()))))
        energy_P = (whitened(z_WP, rho) ** 2).mean(axis=0)
        tail = float(energy_P[energy_P <= np.quantile(energy_P, _QUIET)].mean()) / _QUIET_ENERGY
        high, raised = np.pad(z_WP >= HIGH_Z, ((1, 1), (0, 0))), np.pad(z_WP >= RAISED_Z, ((1, 1), (0, 0)))
        alone = high[1:-1] & ~raised[:-2] & ~raised[2:]
        return Chance(rho, max(1.0, tail), max(floor, float(alone.sum()) / num_known))

    def windows_needed(self, num_places: int) -> int:
        """How many high windows in a row chance does not give to any of the places."""
        rate = min(self.high_rate, 0.5)
        return max(2, math.ceil(math.log(_RUN_CHANCE / num_places) / math.log(rate)))


def threshold(num_places: int) -> float:
    """The score that the largest of num_places normal scores reaches with FALSE_ALARM_RATE."""
    return NormalDist().inv_cdf(1 - FALSE_ALARM_RATE / num_places)


def best_runs(z_WP: np.ndarray, chance: Chance, min_score: float) -> list[Run]:
    """Every place's best run, if it reaches min_score. A window without data speaks against a run, weakly.

    A matched filter: noise is made independent from window to window (whitened), and compared with what a step that
    begins with the run's first window and ends after its last looks like then.
    """
    rho = chance.autocorrelation
    places = np.flatnonzero((z_WP >= RAISED_Z).any(axis=0))
    fresh_WP = whitened(z_WP[:, places], rho)
    best = _Best.of(len(places))
    for length in range(1, len(z_WP) + 1):
        best.offer(_scores(fresh_WP, length, rho), length)
    scores = best.score_P / math.sqrt(chance.tail)
    return [
        Run(int(places[p]), int(best.first_P[p]), int(best.first_P[p]) + int(best.length_P[p]) - 1, float(scores[p]))
        for p in np.flatnonzero(scores >= min_score)
    ]


def whitened(z_WP: np.ndarray, rho: float) -> np.ndarray:
    """Clipped, and less what the window before lets one expect."""
    z_WP = np.clip(np.nan_to_num(z_WP), -CLIP_Z, CLIP_Z)
    fresh_WP = z_WP.copy()
    fresh_WP[1:] = (z_WP[1:] - rho * z_WP[:-1]) / math.sqrt(1 - rho**2)
    return np.clip(fresh_WP, -2 * CLIP_Z, 2 * CLIP_Z)


def _scores(fresh_WP: np.ndarray, length: int, rho: float) -> np.ndarray:
    """[begin, place] scores of all runs of a length."""
    num_windows = len(fresh_WP)
    enter, stay, leave = (c / math.sqrt(1 - rho**2) for c in (1.0, 1 - rho, -rho))
    sums_WP = np.concatenate([np.zeros((1, fresh_WP.shape[1])), fresh_WP.cumsum(axis=0)])
    begin = np.arange(num_windows - length + 1)
    enter_B = np.where(begin == 0, 1.0, enter)  # the log's first window is not compared with one before
    end = begin + length
    ends_inside = end < num_windows
    score = enter_B[:, None] * fresh_WP[begin] + stay * (sums_WP[end] - sums_WP[begin + 1])
    score[ends_inside] += leave * fresh_WP[end[ends_inside]]
    norm_B = np.sqrt(enter_B**2 + stay**2 * (length - 1) + np.where(ends_inside, leave**2, 0.0))
    return score / norm_B[:, None]


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
