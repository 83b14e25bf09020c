"""Scores: which instance gets a request. All are milliseconds or comparable with each other; less is better.

prefill   how long until the prompt is computed: the tokens that wait there, and those of its own that no cache has, by
          the speed that was measured
decode    "step": the slowest rank's step, predicted from its rows and cached tokens, because all ranks of an instance
          wait for it; "kv": the fullest rank's tokens; "batch": its rows

Knows nothing of connections or sequences.
"""

import random
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

_FIRST_TOKENS_PER_S = 1000.0
_LEARNING = 0.2  # weight of the latest prompt
_FORGETTING = 0.995  # of each step
_TIE = 0.05  # scores that differ by less are equal: what was told last is always a little old
# Seconds of a step before any was measured: of itself, of a row, of a cached token.
_PRIOR_S = np.array([5e-3, 1e-4, 1e-7])

_Choice = TypeVar("_Choice")


class PrefillRate:
    """Tokens per second at which an instance's prompts get their first tokens."""

    def __init__(self):
        self.tokens_per_s = _FIRST_TOKENS_PER_S

    def add_prompt(self, num_tokens: int, took_s: float) -> None:
        """num_tokens: that were before the first token when the prompt came, its own included."""
        if num_tokens > 0 and took_s > 0:
            self.tokens_per_s += _LEARNING * (num_tokens / took_s - self.tokens_per_s)

    def predict_ms(self, num_tokens: int) -> float:
        return 1e3 * num_tokens / self.tokens_per_s


class StepModel:
    """Seconds of a step: a part of its own, one for each row and one for each cached token of the fullest rank. A least
    squares fit, in which older steps count less."""

    def __init__(self):
        self._scale_3 = np.array([1.0, 0.1, 1e-4])  # brings the three to about one size
        self._squares_33 = np.eye(3) * 1e-2
        self._products_3 = self._squares_33 @ (_PRIOR_S / self._scale_3)

    def add_step(self, num_rows: int, num_tokens: int, took_s: float) -> None:
        """num_rows, num_tokens: the largest of a rank."""
        if num_rows > 0 and took_s > 0:
            values_3 = self._values(num_rows, num_tokens)
            self._squares_33 = _FORGETTING * self._squares_33 + np.outer(values_3, values_3)
            self._products_3 = _FORGETTING * self._products_3 + took_s * values_3

    def _values(self, num_rows: int, num_tokens: int) -> np.ndarray:
        return np.array([1.0, num_rows, num_tokens]) * self._scale_3

    @property
    def seconds_3(self) -> np.ndarray:
        """Of a step itself, of a row, of a cached token; none below 0, so that more is never predicted to be faster."""
        squares_33 = self._squares_33 + np.eye(3) * 1e-9
        return np.maximum(np.linalg.solve(squares_33, self._products_3) * self._scale_3, 0.0)

    def predict_ms(self, num_rows: int, num_tokens: int) -> float:
        return 1e3 * float(self.seconds_3 @ np.array([1.0, num_rows, num_tokens]))


def choose(choices: Sequence[_Choice], score: Callable[[_Choice], float], rng: random.Random) -> _Choice:
    """One of the best, at random: where many routers or requests see the same numbers, not all take the same one."""
    scores = [score(choice) for choice in choices]
    least = min(scores)
    return rng.choice([choice for choice, one in zip(choices, scores) if one <= least + _TIE * abs(least)])
