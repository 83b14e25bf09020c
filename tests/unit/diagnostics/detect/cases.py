"""Noise that the tests of chance and runs share."""

import numpy as np
from eprt.diagnostics.detect.chance import Memory

NUM_WINDOWS, NUM_LINKS = 12, 2000


def noise(memory: Memory, seed: int = 0, num_windows: int = NUM_WINDOWS) -> np.ndarray:
    root_WW = np.linalg.cholesky(memory.correlation(num_windows))
    return root_WW @ np.random.default_rng(seed).standard_normal((num_windows, NUM_LINKS))
