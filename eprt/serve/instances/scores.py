"""Scores: which instance gets a request. All are milliseconds or comparable with each other; less is better.

prefill   how long until the prompt is computed: the tokens that wait there, and those of its own that no cache has, by
          the speed that was measured; of tokens that wait there, those of tiers behind do not count
decode    "step": the slowest rank's step, predicted from its rows and cached tokens, because all ranks of an instance
          wait for it; "kv": the fullest rank's tokens; "batch": its rows

Knows nothing of connections or sequences.
"""

import random
from collections.abc import Callable, Sequence
from typing import TypeVar

_FIRST_TOKENS_PER_S = 1000.0
_LEARNING = 0.2  # weight of the latest prompt
_TIE = 0.05  # scores that differ by less are equal: what was told last is always a little old

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


def best_of(choices: Sequence[_Choice], score: Callable[[_Choice], float]) -> list[_Choice]:
    """Those whose score is the least, or as good as that."""
    scores = [score(choice) for choice in choices]
    least = min(scores)
    return [choice for choice, one in zip(choices, scores) if one <= least + _TIE * abs(least)]


def choose(choices: Sequence[_Choice], score: Callable[[_Choice], float], rng: random.Random) -> _Choice:
    """One of the best, at random: where many routers or requests see the same numbers, not all take the same one."""
    return rng.choice(best_of(choices, score))
