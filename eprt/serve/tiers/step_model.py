"""StepModel: how long a step of a group of ranks takes. Knows nothing of ranks."""

import numpy as np

from eprt.serve.tiers.fitted_seconds import FittedSeconds

# Seconds of a step before any was measured: of itself, of a row, of a cached token.
_PRIOR_S = (5e-3, 1e-4, 1e-7)


class StepModel:
    """Seconds of a step: a part of its own, one for each row and one for each cached token of the fullest rank."""

    def __init__(self):
        self._fit = FittedSeconds(_PRIOR_S, (1.0, 0.1, 1e-4))

    def add_step(self, num_rows: int, num_tokens: int, took_s: float) -> None:
        """num_rows, num_tokens: the largest of a rank."""
        if num_rows > 0 and took_s > 0:
            self._fit.add_measurement(took_s, num_rows, num_tokens)

    @property
    def seconds_3(self) -> np.ndarray:
        """Of a step itself, of a row, of a cached token."""
        return self._fit.seconds_N

    def predict_ms(self, num_rows: int, num_tokens: int) -> float:
        return 1e3 * self._fit.predict_s(num_rows, num_tokens)
