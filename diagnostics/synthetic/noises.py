"""Noise of synthetic waits: (rng, shape, coefficient of variation) -> positive factors of median about 1.

The first axis of the shape is time. Knows nothing of jobs and faults.
"""

import math
from collections.abc import Callable

import numpy as np


def _lognormal(rng: np.random.Generator, shape: tuple[int, ...], cv: float) -> np.ndarray:
    return rng.lognormal(0, log_sigma(cv), shape)


def _gamma(rng: np.random.Generator, shape: tuple[int, ...], cv: float) -> np.ndarray:
    k = 1 / cv**2
    return rng.gamma(k, 1 / k, shape)


def _heavy(rng: np.random.Generator, shape: tuple[int, ...], cv: float) -> np.ndarray:
    """Student's t with three degrees of freedom in the logarithm: the same middle, with far outliers."""
    return np.exp(np.clip(log_sigma(cv) * 0.85 * rng.standard_t(3, shape), -4, 4))


def _autocorrelated(rng: np.random.Generator, shape: tuple[int, ...], cv: float) -> np.ndarray:
    """Noise that stays for about three windows (AR(1), 0.7)."""
    rho, fresh = 0.7, rng.standard_normal(shape)
    for w in range(1, shape[0]):
        fresh[w] = rho * fresh[w - 1] + math.sqrt(1 - rho**2) * fresh[w]
    return np.exp(log_sigma(cv) * fresh)


def log_sigma(cv: float) -> float:
    """Standard deviation of the logarithm that gives this coefficient of variation."""
    return math.sqrt(math.log(1 + cv**2))


NOISES: dict[str, Callable[..., np.ndarray]] = {
    "lognormal": _lognormal,
    "gamma": _gamma,
    "heavy": _heavy,
    "autocorrelated": _autocorrelated,
}
