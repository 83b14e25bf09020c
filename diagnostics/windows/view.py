"""WindowView: the matrices of one window, or of several, per call, as the page reads them. Knows no sums.

Planes, in this order: dispatch (us), combine (us), tokens (received). [i][j] belongs to waiting rank i, awaited rank j.
"""

import json
from dataclasses import dataclass

import numpy as np

PLANES = ("dispatch", "combine", "tokens")


@dataclass(frozen=True, eq=False)
class WindowView:
    """What all N ranks logged. NaN: no data."""

    number: int | None  # of the window; None where it stands for all windows together
    t_start: float  # Unix time, seconds
    t_end: float
    planes_PNN: np.ndarray  # per call, as in PLANES
    compute_us_N: np.ndarray  # time in the experts per call
    calls_N: np.ndarray  # dispatch + combine pairs

    def pack(self) -> bytes:
        """Planes, compute and calls as float32 behind a line of JSON."""
        head = {
            "window": self.number,
            "t_start": self.t_start,
            "t_end": self.t_end,
            "num_ranks": len(self.calls_N),
            "planes": PLANES,
        }
        return pack(head, self.planes_PNN, self.compute_us_N, self.calls_N)


def pack(header: dict, *arrays: np.ndarray) -> bytes:
    """One line of JSON, padded so that the float32 arrays (little-endian, one after the other) start at 4 bytes."""
    head = json.dumps(header, separators=(",", ":"), allow_nan=False).encode()
    head += b" " * (-(len(head) + 1) % 4) + b"\n"
    return head + b"".join(np.ascontiguousarray(array, dtype="<f4").tobytes() for array in arrays)
