"""FittedSeconds: a time as a sum of parts, each in proportion to a number, learned while the server runs.

A least squares fit, in which older measurements count less. Knows nothing of what takes the time.
"""

from collections.abc import Sequence

import numpy as np


class FittedSeconds:
    """One time.

    Args:
        prior_s: the parts before anything was measured: of the time itself, then one for each number.
        scale: of 1 and of each number, which bring the parts to about one size.
        forgetting: weight that a measurement keeps with each further one.
    """

    def __init__(self, prior_s: Sequence[float], scale: Sequence[float], forgetting: float = 0.995):
        num = len(prior_s)
        self._scale_N, self._forgetting = np.array(scale), forgetting
        self._squares_NN = np.eye(num) * 1e-2
        self._products_N = self._squares_NN @ (np.array(prior_s) / self._scale_N)

    def add_measurement(self, took_s: float, *numbers: float) -> None:
        values_N = np.array([1.0, *numbers]) * self._scale_N
        self._squares_NN = self._forgetting * self._squares_NN + np.outer(values_N, values_N)
        self._products_N = self._forgetting * self._products_N + took_s * values_N

    @property
    def seconds_N(self) -> np.ndarray:
        """The parts; none below 0, so that more is never predicted to be faster."""
        squares_NN = self._squares_NN + np.eye(len(self._scale_N)) * 1e-9
        return np.maximum(np.linalg.solve(squares_NN, self._products_N) * self._scale_N, 0.0)

    def predict_s(self, *numbers: float) -> float:
        return float(self.seconds_N @ np.array([1.0, *numbers]))
