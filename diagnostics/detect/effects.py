"""Effects: a window's waits split into what each awaited rank (column), each waiter (row) and each link (point) adds.

Knows one window at a time, and no faults. It works on logarithms, and with medians, so that a fault does not shift the
scale that it is measured by. The logarithm is log(wait + a quarter of the usual wait): a wait near zero only says "came
first", and how near is chance. Links of one tier (topology.py) are compared with each other.
"""

import math
from dataclasses import dataclass, fields

import numpy as np

from ..windows.medians import low_median, median

START = 0.25  # of the tier's median wait, added before the logarithm
FLOOR_US = 1.0  # waits below the cost of looking are noise
MIN_SIGMA = 0.05  # a log calmer than 5 % is not believed
MIN_RANK_SIGMA = 0.05  # ranks differ by this much without being at fault
_LIKE_OTHERS = 16  # links by which a tier's own noise is drawn to that of all: few links tell little of it
_FEWEST_WINDOWS = 4  # of a log that tells how its ranks change
_FEWEST_RANKS = 8  # that tell how ranks differ
_WINDOWS_THAT_TELL = 8  # of tiers' noise
_ROUNDS = 3  # of Tukey's median polish; more change the third digit


@dataclass(frozen=True, eq=False)
class Effects:
    """W windows, N ranks, natural logarithms; NaN where there are no data and on the diagonal."""

    column_WN: np.ndarray
    row_WN: np.ndarray
    point_WNN: np.ndarray  # what is left of each link
    sigma_W1: np.ndarray  # standard deviation of point_WNN, of all links together
    sigma_NN: np.ndarray  # how many times that the links of its tier have
    rank_error_W1: np.ndarray  # standard error of a column or row, as far as it follows from the links
    column_error_W1: np.ndarray  # of a column, as restless as columns are from window to window
    row_error_W1: np.ndarray

    @staticmethod
    def from_waits(wait_us_WNN: np.ndarray, tier_NN: np.ndarray) -> "Effects":
        """tier_NN: LinkTopology.tier_NN."""
        num_ranks = len(tier_NN)
        left_WNN = _started_logs(wait_us_WNN, tier_NN)
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
        # The standard error of a median of n normal values, and the spread of healthy ranks.
        error_W1 = np.hypot(sigma_W1 * np.sqrt(math.pi / 2 / num_known_W1), MIN_RANK_SIGMA)
        errors = (error_W1 * _restlessness(effect_WN / error_W1) for effect_WN in (column_WN, row_WN))
        return Effects(column_WN, row_WN, left_WNN, sigma_W1, _restless_tiers(left_WNN, tier_NN), error_W1, *errors)

    @property
    def point_z_WNN(self) -> np.ndarray:
        z_WNN = self.point_WNN / self.sigma_W1[:, :, None]
        z_WNN /= self.sigma_NN
        return z_WNN

    def followed_by(self, later: "Effects") -> "Effects":
        """The windows of both."""
        joined = {f.name: np.concatenate([getattr(part, f.name) for part in (self, later)]) for f in fields(Effects)}
        return Effects(**joined | {"sigma_NN": later.sigma_NN})


def _restlessness(z_WN: np.ndarray) -> float:
    """How much more z-scores of ranks vary than standard errors do: what is late for one is late for all, so the waits
    for a rank are not independent. At least 1. How they change from window to window, where a step is one change of
    many; and how ranks differ for good, where a fault is one rank of many."""
    if len(z_WN) < _FEWEST_WINDOWS or np.isnan(z_WN).all():
        return 1.0
    changing = deviation_of_changes(np.abs(np.diff(z_WN, axis=0)))
    lasting = 1.4826 * _middle_size(median(z_WN, 0)) if z_WN.shape[1] >= _FEWEST_RANKS else 0.0
    return max(1.0, math.hypot(changing, lasting))


def deviation_of_changes(changes: np.ndarray) -> float:
    """Standard deviation of values, from the sizes of the changes between neighbours: their median knows no steps."""
    known = changes[~np.isnan(changes)]
    return 1.4826 * float(np.median(known)) / math.sqrt(2) if known.size else 0.0


def ratio_of(effect: np.ndarray) -> np.ndarray:
    """How many times the usual wait an effect makes of it."""
    return np.maximum(0.0, (1 + START) * np.exp(effect) - START)


def _started_logs(wait_us_WNN: np.ndarray, tier_NN: np.ndarray) -> np.ndarray:
    """Logarithms minus the median of their tier; NaN on the diagonal."""
    out_WNN = np.full(wait_us_WNN.shape, np.nan)
    for k in range(int(tier_NN.max(initial=-1)) + 1):
        tier = tier_NN == k
        waits_WX = wait_us_WNN[:, tier]
        floor_W1 = FLOOR_US + START * np.nan_to_num(median(waits_WX, 1))[:, None]
        logs_WX = np.log(waits_WX + floor_W1)
        out_WNN[:, tier] = logs_WX - median(logs_WX, 1)[:, None]
    return out_WNN


def _scale(left_WNN: np.ndarray) -> np.ndarray:
    """Median absolute deviation as a standard deviation, half of it shared by all windows: one window has few links.
    Without the exact zeros that the median polish leaves, one per rank and direction, the scale is right within 7 %
    from 4 to 256 ranks (found by simulation with normal noise)."""
    size_WX = np.abs(left_WNN).reshape(len(left_WNN), -1)
    deviation_W = median(np.where(size_WX < 1e-9, np.nan, size_WX), 1)
    shared_W = np.sqrt(np.nan_to_num(deviation_W) * np.nan_to_num(median(deviation_W, 0)))
    return np.maximum(MIN_SIGMA, 1.4826 * shared_W)[:, None]


def _restless_tiers(left_WNN: np.ndarray, tier_NN: np.ndarray) -> np.ndarray:
    """[N, N]: the noise of each link's tier over that of all links, drawn to 1 where the tier has few. Messages make up
    more of the long links' waits than of the short ones', so they differ in noise as well."""
    out_NN, num_tiers = np.ones(tier_NN.shape), int(tier_NN.max(initial=-1)) + 1
    if num_tiers < 2:
        return out_NN
    left_WNN = left_WNN[:: max(1, len(left_WNN) // _WINDOWS_THAT_TELL)]
    usual_W = np.array([_middle_size(left_NN) for left_NN in left_WNN])
    for k in range(num_tiers):
        tier = tier_NN == k
        own_W, num = np.array([_middle_size(left_NN[tier]) for left_NN in left_WNN]), int(tier.sum())
        ratio = float(np.median(own_W[usual_W > 0] / usual_W[usual_W > 0])) if (usual_W > 0).any() else 1.0
        out_NN[tier] = math.sqrt((num * ratio**2 + _LIKE_OTHERS) / (num + _LIKE_OTHERS))
    return out_NN


def _middle_size(values: np.ndarray) -> float:
    """Median of what is neither unknown nor an exact zero, which the median polish leaves."""
    size = np.abs(values[np.abs(values) >= 1e-9])
    return float(np.median(size)) if size.size else 0.0
