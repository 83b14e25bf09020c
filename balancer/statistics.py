"""LoadStatistics: the recent load of a running server, whether it has changed, and how long it is expected to last.

Memory is bounded by max_windows. P phases (prefill, decode), W windows, L layers, E experts, D = L x E. Knows nothing
of placements.
"""

from collections import deque
from dataclasses import dataclass

import numpy as np

PHASES = ("prefill", "decode")
_PERMUTATIONS = 199
_TESTED_WINDOWS = 32  # the latest; bounds the cost of a test: 1 ms without a change, 10 ms with one
_MIN_SIDE = 3  # minimum number of windows on each side of a change
_REMEMBERED_CHANGES = 16


@dataclass(frozen=True, eq=False)
class LoadWindow:
    """The load of one window."""

    tokens_PLE: np.ndarray  # float32 [2, L, E]: choices of each expert
    seconds: float  # length of the window
    steps: int  # number of steps in it
    last_step: int = 0  # number of the last step


class LoadStatistics:
    """A sliding window over the load, and tests on it.

    half_life: age in windows at which the weight of a window is one half.
    min_tokens: windows with fewer choices per layer are ignored, since an idle server carries no information.
    significance: probability of a false alarm in one test.
    min_shift: changes of fewer tokens than this fraction (total variation) are ignored.
    """

    def __init__(
        self,
        num_layers: int,
        num_experts: int,
        *,
        max_windows: int = 60,
        half_life: float = 6.0,
        min_tokens: int = 256,
        significance: float = 0.005,
        min_shift: float = 0.02,
    ):
        self.shape = (len(PHASES), num_layers, num_experts)
        self._half_life, self._min_tokens = half_life, min_tokens
        self._significance, self._min_shift = significance, min_shift
        self._windows: deque[LoadWindow] = deque(maxlen=max_windows)
        # Of the windows since the latest change: each layer's shares minus even shares, and their inner products.
        self._skew_WD = np.empty((0, num_layers * num_experts), dtype=np.float32)
        self._gram_WW = np.empty((0, 0))
        self._rates: dict[int, np.ndarray] = {}  # cache for the present windows
        self._num_current = 0  # windows since the latest change
        self.num_changes = self.num_windows = 0  # since the start
        self._observed_s = 0.0
        # (time, changed part of the skew) of each change; the first entry is the start.
        self._changes = deque([(0.0, 0.0)], maxlen=_REMEMBERED_CHANGES)

    def __len__(self) -> int:
        return len(self._windows)

    def add_window(self, tokens_PLE: np.ndarray, seconds: float, steps: int = 0, last_step: int = 0) -> bool:
        """True if the test with the new window finds a change of the load, now or a few windows ago.

        ValueError names phase, layer, expert and value of a bad count, or the bad length of the window.
        """
        tokens_PLE = np.asarray(tokens_PLE)
        if tokens_PLE.shape != self.shape:
            raise ValueError(f"tokens_PLE has shape {tokens_PLE.shape}, expected {self.shape}")
        bad = np.argwhere(~np.isfinite(tokens_PLE) | (tokens_PLE < 0))
        if len(bad):
            phase, layer, expert = bad[0]
            value = tokens_PLE[phase, layer, expert]
            raise ValueError(f"tokens[{PHASES[phase]}, layer {layer}, expert {expert}] = {value}: must be at least 0")
        if not seconds > 0 or steps < 0:
            raise ValueError(f"a window of seconds={seconds}, steps={steps}: must be above 0 and at least 0")
        if tokens_PLE.sum() < self._min_tokens * self.shape[1]:
            return False
        self._windows.append(LoadWindow(tokens_PLE.astype(np.float32), seconds, steps, last_step))
        self.num_windows += 1
        self._rates = {}
        self._num_current = min(self._num_current + 1, len(self._windows))
        self._observed_s += seconds
        return self._detect_change()

    @property
    def current_windows(self) -> list[LoadWindow]:
        """The windows since the latest change, oldest first."""
        return list(self._windows)[len(self._windows) - self._num_current :]

    def rate(self, last: int | None = None) -> np.ndarray | None:
        """float64 [L, E]: tokens per second, an exponentially weighted mean over the windows since the latest change,
        or over the latest `last` of them. None without a window."""
        # add_window() in another thread replaces this dictionary, so a rate never outlives the windows it is made from.
        rates = self._rates
        windows = self.current_windows if last is None else self.current_windows[-last:]
        if not windows:
            return None
        if len(windows) not in rates:
            weight_W = self._weights(len(windows))
            tokens_PLE = np.zeros(self.shape)
            for weight, window in zip(weight_W, windows):
                tokens_PLE += weight * window.tokens_PLE
            rate_LE = tokens_PLE.sum(0) / float(weight_W @ [w.seconds for w in windows])
            rate_LE.setflags(write=False)
            rates[len(windows)] = rate_LE
        return rates[len(windows)]

    @property
    def steps_per_s(self) -> float:
        """The server's steps per second, the same weighted mean."""
        windows = self.current_windows
        weight_W = self._weights(len(windows))
        return float(weight_W @ [w.steps for w in windows]) / float(weight_W @ [w.seconds for w in windows] or 1.0)

    def noise(self, last: int | None = None) -> float:
        """The noise of rate(last=last) relative to that of a single window: 1 / sqrt(effective number of windows)."""
        weight_W = self._weights(len(self.current_windows if last is None else self.current_windows[-last:]))
        return float(np.sqrt((weight_W**2).sum()) / max(weight_W.sum(), 1e-9))

    def _weights(self, num_windows: int) -> np.ndarray:
        return 0.5 ** (np.arange(num_windows)[::-1] / self._half_life)

    @property
    def lifetime_s(self) -> float:
        """How long a plan for the present load is expected to be useful, estimated from the past; 0 without a window.

        The rates of three causes add up: a first change (not observed since the start, so its rate is one over that
        time), changes like those observed, each weighted by the part of the skew that it changed, and drift.
        """
        if not self._observed_s:
            return 0.0
        changed = sum(part for _, part in self._changes) / (self._observed_s - self._changes[0][0])
        return 1 / (1 / self._observed_s + changed + self.drift_rate)

    @property
    def drift_rate(self) -> float:
        """The part of the load's skew that changes per second, since the latest change: the slope of the variogram.
        Half the mean square difference of two windows grows with the time between them by the drift; the noise of
        counting is only the offset."""
        num_windows = len(self._gram_WW)
        if num_windows < 2 * _MIN_SIDE:
            return 0.0
        lags = range(1, num_windows // 2 + 1)
        square_W = np.diag(self._gram_WW)
        product_G = np.array([np.diag(self._gram_WW, lag).mean() for lag in lags])
        sum_G = np.array([(square_W[lag:] + square_W[:-lag]).mean() / 2 for lag in lags])
        if product_G[0] <= 0:
            return 0.0  # nothing but noise
        slope = np.polyfit(lags, sum_G - product_G, 1, w=np.sqrt(num_windows - np.array(lags)))[0]
        seconds = sum(w.seconds for w in list(self._windows)[-num_windows:]) / num_windows
        return max(0.0, float(slope)) / float(product_G[0]) / max(seconds, 1e-9)

    def windows(self, phase: str | None = None) -> np.ndarray:
        """float32 [W, L, E]: all windows in memory, oldest first, as a load file holds them."""
        if not self._windows:
            return np.zeros((0, *self.shape[1:]), dtype=np.float32)
        parts = [w.tokens_PLE.sum(0) if phase is None else w.tokens_PLE[PHASES.index(phase)] for w in self._windows]
        return np.stack(parts)

    def window_of_steps(self, step_T: np.ndarray) -> np.ndarray:
        """int32 [T]: the number in windows() of the window in which each step was computed; -1: in none of them.
        step_T: int64, step numbers of the server."""
        last_W = np.array([w.last_step for w in self._windows], dtype=np.int64)
        first_W = last_W - [w.steps for w in self._windows]
        at_T = np.searchsorted(last_W, step_T)  # the first window that does not end before the step
        inside_T = at_T < len(last_W)
        inside_T[inside_T] = step_T[inside_T] > first_W[at_T[inside_T]]
        return np.where(inside_T, at_T, -1).astype(np.int32)

    def _detect_change(self) -> bool:
        """Tests the latest windows for a change; if there is one, drops what came before it."""
        skew_D = _skew(self._windows[-1].tokens_PLE.sum(0)).reshape(-1)
        self._skew_WD = np.concatenate((self._skew_WD, skew_D[None]))[-_TESTED_WINDOWS:]
        self._gram_WW = gram_WW = np.pad(self._gram_WW, (0, 1))[-_TESTED_WINDOWS:, -_TESTED_WINDOWS:]
        gram_WW[-1] = gram_WW[:, -1] = self._skew_WD @ skew_D
        found = change_point(gram_WW, self._significance)
        if found is None:
            return False
        start, _ = found
        before_D, after_D = self._skew_WD[:start].mean(0), self._skew_WD[start:].mean(0)
        shift_LE = (before_D - after_D).reshape(self.shape[1:])
        if np.abs(shift_LE).sum(-1).mean() / 2 < self._min_shift:
            return False
        self._skew_WD, self._gram_WW = self._skew_WD[start:], gram_WW[start:, start:]
        self._num_current = len(gram_WW) - start
        self.num_changes += 1
        kept = float(before_D @ after_D) / max(float(before_D @ before_D), float(after_D @ after_D), 1e-12)
        since_s = sum(w.seconds for w in self.current_windows)
        self._changes.append((self._observed_s - since_s, 1 - min(max(kept, 0.0), 1.0)))
        return True


def change_point(gram_WW: np.ndarray, significance: float = 0.005, seed: int = 0) -> tuple[int, float] | None:
    """(first window after the change, p-value) of the most likely change of the mean in a sequence of windows, or None.

    The statistic is the maximum over k of the CUSUM statistic k (W - k) / W |mean before - mean after|^2. It is
    compared with the statistic of random permutations of the windows, which is exact for any distribution of the noise
    as long as windows without a change are exchangeable.

    gram_WW: inner products of the windows.
    """
    num_windows = len(gram_WW)
    if num_windows < 2 * _MIN_SIDE:
        return None
    centred_WW = gram_WW - gram_WW.mean(0) - gram_WW.mean(1)[:, None] + gram_WW.mean()
    seen_K = _cusum(centred_WW, np.arange(num_windows)[None])[0]
    rng = np.random.default_rng(seed)
    order_OW = np.argsort(rng.random((_PERMUTATIONS, num_windows)), axis=1)
    at_least = 1  # permutations with at least the observed statistic; the observed order is one
    for some_OW in np.array_split(order_OW, 10):
        at_least += int((_cusum(centred_WW, some_OW).max(1) >= seen_K.max() * (1 - 1e-12)).sum())
        if at_least > significance * (_PERMUTATIONS + 1):
            return None  # early exit: most windows bring no change
    return int(seen_K.argmax()) + _MIN_SIDE, at_least / (_PERMUTATIONS + 1)


def _cusum(centred_WW: np.ndarray, order_OW: np.ndarray) -> np.ndarray:
    """float64 [O, K]: the statistic of each permutation of the windows, for each position of a change."""
    num_windows = len(centred_WW)
    k = np.arange(_MIN_SIDE, num_windows - _MIN_SIDE + 1)
    ordered_OWW = centred_WW[order_OW[:, :, None], order_OW[:, None, :]]
    # The mean is 0, so the sums before and after a change differ only in sign. Each window adds to |sum of the first
    # k|^2 its product with itself and twice its products with the windows before it.
    once_WW = np.tri(num_windows) + np.tri(num_windows, k=-1)
    before_OK = np.einsum("oij,ij->oi", ordered_OWW, once_WW).cumsum(1)[:, k - 1]
    return before_OK * num_windows / (k * (num_windows - k))


def _skew(tokens_LE: np.ndarray) -> np.ndarray:
    """Each expert's share of its layer's tokens minus the even share; 0 in a layer without tokens."""
    total_L1 = tokens_LE.sum(-1, keepdims=True)
    even_LE = np.full_like(tokens_LE, 1 / tokens_LE.shape[-1])
    return np.divide(tokens_LE, total_L1, out=even_LE, where=total_L1 > 0) - 1 / tokens_LE.shape[-1]
