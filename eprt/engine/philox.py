"""Random numbers that depend on a key and a counter and on nothing else: Philox4x32-10, vectorised in numpy.

Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).
"""

import numpy as np

_MULTIPLIER_0, _MULTIPLIER_1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_WEYL_0, _WEYL_1 = 0x9E3779B9, 0xBB67AE85
_LOW, _SHIFT = np.uint64(0xFFFF_FFFF), np.uint64(32)


def philox4x32(counter: tuple[np.ndarray, ...], key: tuple[np.ndarray, np.ndarray]) -> tuple[np.ndarray, ...]:
    """Ten rounds. counter: four, key: two uint64 arrays [X] with values below 2**32. Returns four such arrays."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for i in range(10):
        round_k0 = (k0 + np.uint64(i * _WEYL_0 & 0xFFFF_FFFF)) & _LOW
        round_k1 = (k1 + np.uint64(i * _WEYL_1 & 0xFFFF_FFFF)) & _LOW
        product_0, product_1 = _MULTIPLIER_0 * c0, _MULTIPLIER_1 * c2
        c0, c1 = (product_1 >> _SHIFT) ^ c1 ^ round_k0, product_1 & _LOW
        c2, c3 = (product_0 >> _SHIFT) ^ c3 ^ round_k1, product_0 & _LOW
    return c0, c1, c2, c3


def uniform(seed_X: np.ndarray, stream_X: np.ndarray, position_X: np.ndarray) -> np.ndarray:
    """One float64 in [0, 1) with 53 random bits per entry, a pure function of seed_X (uint64), stream_X and position_X
    (uint64 below 2**32), which broadcast."""
    zero = np.zeros_like(seed_X)
    a, b, _, _ = philox4x32((position_X, stream_X, zero, zero), (seed_X & _LOW, seed_X >> _SHIFT))
    return ((a >> np.uint64(5)) * float(1 << 26) + (b >> np.uint64(6))) * (1.0 / (1 << 53))
