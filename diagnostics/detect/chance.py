"""Chance: how a log's own noise behaves from window to window, so that runs of windows are scored fairly.

Knows z-scores of links, and no faults. Noise has three parts, all fitted to the links that are surely not at fault:
links differ permanently (lasting), some noise stays for a while (fading), and the rest is new in each window. A sum
over windows averages out only the last part. Heavy tails also widen what counts as chance.
"""

import math
from dataclasses import dataclass

import numpy as np

CLIP_Z = 5.0  # one window counts for no more: a burst in one window is not a persistent fault
HIGH_Z, RAISED_Z = 3.5, 2.0
# Share of links that are surely not at fault, and the variance of normal noise among them.
_QUIET, _QUIET_ENERGY = 0.95, 0.93
_LINKS_THAT_TELL = 16_384
_RUN_CHANCE = 3e-4  # the chance that noise alone gives one run of so many high windows
_FAR_Z = 20.0
_MAX_LAG, _MOST_REMEMBERED = 32, 0.97
_FADINGS = np.arange(0.05, 0.96, 0.05)


@dataclass(frozen=True)
class Memory:
    """Correlation of a place's noise in windows k apart: lasting + fading * rho**k, and 1 for k = 0."""

    lasting: float = 0.0
    fading: float = 0.0
    rho: float = 0.0

    @staticmethod
    def from_noise(z_WP: np.ndarray) -> "Memory":
        """Least squares over the correlations at up to 32 lags."""
        lags = np.arange(1, min(len(z_WP) - 1, _MAX_LAG) + 1)
        variance = max(1e-9, float((z_WP**2).mean()))
        seen_K = np.array([(z_WP[k:] * z_WP[:-k]).mean() for k in lags]) / variance
        weight_K = (len(z_WP) - lags).astype(float)
        # For each rho three fits, as neither share may be below 0: both together, and each alone.
        fades_RK = _FADINGS[:, None] ** lags
        one, fade, fade2 = weight_K.sum(), fades_RK @ weight_K, fades_RK**2 @ weight_K
        seen_one, seen_fade = weight_K @ seen_K, fades_RK @ (weight_K * seen_K)
        determinant = np.maximum(1e-9, one * fade2 - fade**2)
        both = (fade2 * seen_one - fade * seen_fade) / determinant, (one * seen_fade - fade * seen_one) / determinant
        nothing = np.zeros(len(_FADINGS))
        fits_F2R = np.array([both, (nothing + seen_one / one, nothing), (nothing, seen_fade / fade2)])
        fits_F2R = np.maximum(0.0, fits_F2R)
        fits_F2R *= np.minimum(1.0, _MOST_REMEMBERED / np.maximum(1e-9, fits_F2R.sum(axis=1, keepdims=True)))
        left_FRK = fits_F2R[:, 0, :, None] + fits_F2R[:, 1, :, None] * fades_RK - seen_K
        kind, r = np.unravel_index(((left_FRK**2) @ weight_K).argmin(), (3, len(_FADINGS)))
        return Memory(float(fits_F2R[kind, 0, r]), float(fits_F2R[kind, 1, r]), float(_FADINGS[r]))

    def correlation(self, num_windows: int) -> np.ndarray:
        """[W][W]"""
        lag_WW = np.abs(np.subtract.outer(np.arange(num_windows), np.arange(num_windows)))
        return np.where(lag_WW == 0, 1.0, self.lasting + self.fading * self.rho**lag_WW)


@dataclass(frozen=True)
class Chance:
    """The noise of a log's links."""

    memory: Memory = Memory()
    tail: float = 1.0  # variance of clipped z over that of normal noise
    high_rate: float = 1e-3  # share of a link's windows that are high and alone, as noise is and a fault is not
    level: float = 0.0  # variance of what is lasting beyond the memory's 1: places have levels of their own

    @staticmethod
    def from_links(z_WP: np.ndarray) -> "Chance":
        """Of very many links a sample is enough."""
        z_WP = z_WP[:, :: max(1, z_WP.shape[1] // _LINKS_THAT_TELL)]
        num_known = max(1, int((~np.isnan(z_WP)).sum()))
        floor = min(1e-3, 0.5 / num_known)
        if len(z_WP) < 3:
            return Chance(high_rate=floor)
        # A faulty link is among the loudest, which are left out; and however loud one is, its share is bounded.
        memory = Memory.from_noise(_quiet(np.clip(np.nan_to_num(z_WP), -RAISED_Z, RAISED_Z)))
        fresh_WP = np.linalg.solve(np.linalg.cholesky(memory.correlation(len(z_WP))), clipped(z_WP))
        tail = float((_quiet(fresh_WP) ** 2).mean()) / _QUIET_ENERGY
        high, raised = np.pad(z_WP >= HIGH_Z, ((1, 1), (0, 0))), np.pad(z_WP >= RAISED_Z, ((1, 1), (0, 0)))
        alone = high[1:-1] & ~raised[:-2] & ~raised[2:]
        return Chance(memory, max(1.0, tail), max(floor, float(alone.sum()) / num_known))

    def covariance(self, num_windows: int) -> np.ndarray:
        """[W][W]"""
        return self.memory.correlation(num_windows) + self.level

    def is_enough(self, z_W: np.ndarray, num_places: int, num_windows: int) -> bool:
        """Whether a run has more high windows than chance gives to any of the places: two where they are far out, and
        all num_windows of a log that has fewer than chance may give."""
        needed = max(2, math.ceil(math.log(_RUN_CHANCE / num_places) / math.log(min(self.high_rate, 0.5))))
        return (z_W >= HIGH_Z).sum() >= min(num_windows, needed) or (z_W >= _FAR_Z).sum() >= 2


def clipped(z: np.ndarray) -> np.ndarray:
    """One window counts for at most CLIP_Z, and a window without data for nothing."""
    return np.clip(np.nan_to_num(z), -CLIP_Z, CLIP_Z)


def _quiet(z_WP: np.ndarray) -> np.ndarray:
    """Without the loudest links."""
    energy_P = (z_WP**2).sum(axis=0)
    return z_WP[:, energy_P <= np.quantile(energy_P, _QUIET)]
