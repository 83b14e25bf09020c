"""LoadStatistics: the recent load of a running server, window by window, and whether it has changed.

Memory is bounded by max_windows. P phases (prefill, decode), W windows, L layers, E experts.
"""

from collections import deque
from dataclasses import dataclass

import numpy as np

PHASES = ("prefill", "decode")
_PERMUTATIONS = 199
_TESTED_WINDOWS = 32  # the latest; bounds the cost of a test to about a millisecond
_MIN_SIDE = 3  # windows on each side of a change


@dataclass(frozen=True, eq=False)
class Window:
    """tokens_PLE: float32 [2, L, E], choices of each expert in the window. seconds: how long it was."""

    tokens_PLE: np.ndarray
    seconds: float


class LoadStatistics:
    """half_life: age in windows at which a window counts half. min_tokens: a window with fewer choices per layer is
    left out: an idle server tells nothing. significance: chance of a false alarm of one test. min_shift: a change of
    fewer tokens than this fraction (total variation) is none worth knowing.
    """

    def __init__(
        self,
        num_layers: int,
        num_experts: int,
        *,
        max_windows: int = 60,
        half_life: float = 6.0,
        min_tokens: int = 256,
        significance: float = 0.01,
        min_shift: float = 0.02,
    ):
        self.shape = (len(PHASES), num_layers, num_experts)
        self._half_life, self._min_tokens = half_life, min_tokens
        self._significance, self._min_shift = significance, min_shift
        self._windows: deque[Window] = deque(maxlen=max_windows)
        # Each layer's shares of the windows since the latest change, and their inner products.
        self._share_WD = np.empty((0, num_layers * num_experts), dtype=np.float32)
        self._gram_WW = np.empty((0, 0))
        self._num_current = 0  # windows since the latest change
        self.num_changes = 0
        self.stable_s = 0.0  # time since the latest change, in windows that counted

    def __len__(self) -> int:
        return len(self._windows)

    def add(self, tokens_PLE: np.ndarray, seconds: float) -> bool:
        """Takes a window in; True if the load was found to have changed, a few windows ago or just now.

        ValueError naming phase, layer, expert and value for what cannot be a count.
        """
        tokens_PLE = np.asarray(tokens_PLE)
        if tokens_PLE.shape != self.shape:
            raise ValueError(f"tokens_PLE has shape {tokens_PLE.shape}, expected {self.shape}")
        bad = np.argwhere(~np.isfinite(tokens_PLE) | (tokens_PLE < 0))
        if len(bad):
            phase, layer, expert = bad[0]
            value = tokens_PLE[phase, layer, expert]
            raise ValueError(f"tokens[{PHASES[phase]}, layer {layer}, expert {expert}] = {value}: must be at least 0")
        if tokens_PLE.sum() < self._min_tokens * self.shape[1]:
            return False
        self._windows.append(Window(tokens_PLE.astype(np.float32), seconds))
        self._num_current = min(self._num_current + 1, len(self._windows))
        self.stable_s += seconds
        return self._test()

    @property
    def current(self) -> list[Window]:
        """Windows since the latest change, oldest first."""
        return list(self._windows)[len(self._windows) - self._num_current :]

    def rate(self, phase: str | None = None) -> np.ndarray | None:
        """float64 [L, E]: tokens per second, an exponentially weighted mean over the windows since the latest change.

        phase: "prefill", "decode" or, by default, both together. None without a window.
        """
        windows = self.current
        if not windows:
            return None
        weight_W = 0.5 ** (np.arange(len(windows))[::-1] / self._half_life)
        tokens_PLE = np.tensordot(weight_W, [w.tokens_PLE for w in windows], axes=1)
        tokens_LE = tokens_PLE.sum(0) if phase is None else tokens_PLE[PHASES.index(phase)]
        return tokens_LE / float(weight_W @ [w.seconds for w in windows])

    def windows(self, phase: str | None = None) -> np.ndarray:
        """float32 [W, L, E]: all windows there are, oldest first; what a load file holds."""
        if not self._windows:
            return np.zeros((0, *self.shape[1:]), dtype=np.float32)
        parts = [w.tokens_PLE.sum(0) if phase is None else w.tokens_PLE[PHASES.index(phase)] for w in self._windows]
        return np.stack(parts)

    def _test(self) -> bool:
        """Forgets what came before a change, if there was one."""
        share_D = _shares(self._windows[-1].tokens_PLE.sum(0)).reshape(-1)
        self._share_WD = np.concatenate((self._share_WD, share_D[None]))[-_TESTED_WINDOWS:]
        product_W = self._share_WD @ share_D
        size = len(product_W)
        gram_WW = np.empty((size, size))
        gram_WW[:-1, :-1] = self._gram_WW[-(size - 1) :, -(size - 1) :] if size > 1 else 0
        gram_WW[-1] = gram_WW[:, -1] = product_W
        self._gram_WW = gram_WW
        found = change_point(gram_WW, self._significance)
        if found is None:
            return False
        start, _ = found
        shift_LE = (self._share_WD[:start].mean(0) - self._share_WD[start:].mean(0)).reshape(self.shape[1:])
        if np.abs(shift_LE).sum(-1).mean() / 2 < self._min_shift:
            return False
        self._share_WD, self._gram_WW = self._share_WD[start:], gram_WW[start:, start:]
        self._num_current = size - start
        self.stable_s = sum(w.seconds for w in self.current)
        self.num_changes += 1
        return True


def change_point(gram_WW: np.ndarray, significance: float = 0.01, seed: int = 0) -> tuple[int, float] | None:
    """(first window of what is new, p-value) of the most likely change of the mean in a sequence of windows, or None.

    gram_WW: inner products of the windows. CUSUM statistic k (W - k) / W |mean before - mean after|^2, largest over k,
    compared with the same of randomly ordered windows: exact for any distribution of the noise, as long as windows
    without a change are exchangeable.
    """
    num_windows = len(gram_WW)
    if num_windows < 2 * _MIN_SIDE:
        return None
    centred_WW = gram_WW - gram_WW.mean(0) - gram_WW.mean(1)[:, None] + gram_WW.mean()
    rng = np.random.default_rng(seed)
    order_OW = np.argsort(rng.random((_PERMUTATIONS + 1, num_windows)), axis=1)
    order_OW[0] = np.arange(num_windows)
    ordered_OWW = centred_WW[order_OW[:, :, None], order_OW[:, None, :]]
    k = np.arange(_MIN_SIDE, num_windows - _MIN_SIDE + 1)
    # The mean is 0, so what is before and what is after sum to the same, with opposite signs.
    before_OK = ordered_OWW.cumsum(1).cumsum(2)[:, k - 1, k - 1]  # |sum of the first k|^2
    statistic_OK = before_OK * num_windows / (k * (num_windows - k))
    best_O = statistic_OK.max(1)
    p_value = float(np.mean(best_O >= best_O[0] * (1 - 1e-12)))
    return None if p_value > significance else (int(statistic_OK[0].argmax()) + _MIN_SIDE, p_value)


def _shares(tokens_LE: np.ndarray) -> np.ndarray:
    total_L1 = tokens_LE.sum(-1, keepdims=True)
    return np.divide(tokens_LE, total_L1, out=np.zeros_like(tokens_LE), where=total_L1 > 0)
