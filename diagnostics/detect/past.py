"""Changes: in which windows a place is higher than in the others of the run, or than in a saved baseline.

Peers say little where there are few of them; a place's own past says more. Every place has a level of its own, and the
noise around it is measured by how neighbouring windows differ, which a step hardly moves. Knows no ranks or links.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from ..windows.medians import median
from .chance import Chance, Memory
from .effects import deviation_of_changes, ratio_of
from .runs import WindowRun, find_best_runs, least_score

LEVEL = 25.0  # variance of the places' own levels, in noise variances: nothing is assumed about them
MIN_PAST = 3  # windows before a run that tell a place's usual level
MIN_NOISE = 0.04  # of a logarithm
LARGE, LARGE_Z = 0.8, 1.282  # quantile of the changes that shows tails, and the same of normal noise
RAISED_Z, STEADY = 1.25, 0.75  # above the past; part of the run's windows
_AT_ONCE = 8192  # places, to bound memory


@dataclass(frozen=True)
class Limits:
    """What a change must reach to be told."""

    min_ratio: float  # to the past
    short_ratio: float  # over the number of windows, added
    min_windows: int  # a shorter run stands out among the peers, or is no fault
    min_peer_ratio: float  # to the peers, in the same windows
    margin: float = 1.0  # on top of the least score

    def least_ratio(self, num_windows: int) -> float:
        return self.min_ratio + self.short_ratio / num_windows


def _ratio_of_logarithm(run: WindowRun, change: float) -> float:
    return float(ratio_of(np.array(change)))


def find_changes(
    effect_WP: np.ndarray,
    peer_WP: np.ndarray,
    links: Chance,
    limits: Limits,
    num_before: int = 0,
    ratio_of_change: Callable[[WindowRun, float], float] = _ratio_of_logarithm,
    deviation: float | None = None,
) -> Iterator[tuple[WindowRun, float]]:
    """Runs and their ratio to the past. effect_WP: logarithms, or parts of the usual wait; the first num_before windows
    are of a saved baseline, in which no run may begin. peer_WP: logarithms over those of the peers. ratio_of_change:
    what a change of effect_WP in a run makes of the past. deviation: of the noise; None: from the changes."""
    num_windows, num_places = effect_WP.shape
    if num_windows < MIN_PAST + 2:
        return
    memory = _fading(links.memory)
    chance = Chance(memory, links.tail, level=LEVEL)
    if deviation is None:
        deviation = deviation_of_changes(np.abs(np.diff(effect_WP, axis=0)))
    noise = max(MIN_NOISE, deviation / np.sqrt(max(0.1, 1 - memory.fading * memory.rho)))
    min_score = least_score(num_places) + limits.margin
    for start in range(0, num_places, _AT_ONCE):
        part_WP = effect_WP[:, start : start + _AT_ONCE]
        z_WP = (part_WP - median(part_WP, 0)) / noise
        for run in find_best_runs(z_WP, chance, min_score, every_place=True):
            change = _change_of(z_WP[:, run.place], run)
            run = run._replace(place=start + run.place)
            place, length = run.place, run.last - run.first + 1
            if run.first < max(num_before, MIN_PAST) or length < limits.min_windows or change is None:
                continue
            at = slice(run.first, run.last + 1)
            ratio = ratio_of_change(run, change * noise)
            peer_ratio = float(np.nanmedian(ratio_of(peer_WP[at, place])))
            if ratio >= limits.least_ratio(length) and peer_ratio >= limits.min_peer_ratio:
                yield run, ratio


def tail_of_changes(effect_WP: np.ndarray) -> float:
    """Variance of the noise, as its large changes between neighbours have it, over that of its middle: 1 of normal
    noise. A step of a few places is not among them."""
    changes_WP = np.abs(np.diff(effect_WP, axis=0))
    known = changes_WP[changes_WP > 0]  # exact zeros are left by a median polish
    middle = deviation_of_changes(known)
    if middle <= 0:
        return 1.0
    return max(1.0, float(np.quantile(known, LARGE)) / (LARGE_Z * math.sqrt(2) * middle)) ** 2


def _fading(memory: Memory) -> Memory:
    """Without the lasting part: that is the places' own levels."""
    left = max(0.1, 1 - memory.lasting)
    return Memory(0.0, min(0.95, memory.fading / left), memory.rho)


def _change_of(z_W: np.ndarray, run: WindowRun) -> float | None:
    """How far the run lies above the windows outside it; None where it is too short, unsteady, or has no past."""
    inside_W, outside_W = z_W[run.first : run.last + 1], np.delete(z_W, np.arange(run.first, run.last + 1))
    inside_W, outside_W = inside_W[~np.isnan(inside_W)], outside_W[~np.isnan(outside_W)]
    if len(inside_W) < 2 or (~np.isnan(z_W[: run.first])).sum() < MIN_PAST:
        return None
    usual = float(np.median(outside_W))
    if np.mean(inside_W - usual >= RAISED_Z) < STEADY:
        return None
    return float(np.median(inside_W)) - usual
