"""Noise that the detector is tuned on, apart from the noise by which the fault suite judges it (synthetic/noises.py).

Importing this module adds them to NOISES. `bench_faults --tuning` runs the suite on them, with
seeds of their own; thresholds were chosen by what comes out of that.
"""

import math
from collections.abc import Sequence

import numpy as np
from eprt.diagnostics.synthetic.noises import NOISES, log_sigma


def _laplace(rng: np.random.Generator, shape: tuple[int, ...], cv: float) -> np.ndarray:
    """Tails between the normal and Student's."""
    return np.exp(log_sigma(cv) * rng.laplace(0, 1 / math.sqrt(2), shape))


def _spikes(rng: np.random.Generator, shape: tuple[int, ...], cv: float) -> np.ndarray:
    """One window in fifty of a link is two to five times as long."""
    hit = rng.random(shape) < 0.02
    return rng.lognormal(0, log_sigma(cv), shape) * np.where(hit, rng.uniform(2, 5, shape), 1.0)


def _moving(weights: Sequence[float]):
    """Averages of as many windows as there are weights: noise that stays, and is gone after that."""

    def noise(rng: np.random.Generator, shape: tuple[int, ...], cv: float) -> np.ndarray:
        fresh, num = rng.standard_normal((shape[0] + len(weights) - 1, *shape[1:])), len(weights)
        total = sum(weight * fresh[num - 1 - k : num - 1 - k + shape[0]] for k, weight in enumerate(weights))
        return np.exp(log_sigma(cv) / math.hypot(*weights) * total)

    return noise


def _lasting(rng: np.random.Generator, shape: tuple[int, ...], cv: float) -> np.ndarray:
    """Links differ for good, by half of the variance."""
    scale = log_sigma(cv) / math.sqrt(2)
    return np.exp(scale * (rng.standard_normal(shape) + rng.standard_normal((1, *shape[1:]))))


TUNING = {
    "laplace": _laplace,
    "spikes": _spikes,
    "moving 3": _moving([1, 1, 1]),
    "moving 5": _moving([1, 0.8, 0.6, 0.4, 0.2]),
    "moving 6": _moving([1] * 6),
    "lasting": _lasting,
}
NOISES.update(TUNING)
