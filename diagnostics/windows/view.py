"""What the page reads: the matrices of windows (WindowView), packed arrays, and courses over time. Knows no sums.

Planes, in this order: dispatch (us), combine (us), tokens (received). [i][j] belongs to waiting rank i, awaited rank j.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

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
        head = {"window": self.number, "t_start": self.t_start, "t_end": self.t_end, "num_ranks": len(self.calls_N)}
        return pack({**head, "planes": PLANES}, self.planes_PNN, self.compute_us_N, self.calls_N)


def pack(header: dict, *arrays: np.ndarray) -> bytes:
    """One line of JSON, padded so that the float32 arrays (little-endian, one after the other) start at 4 bytes."""
    head = json.dumps(header, separators=(",", ":"), allow_nan=False).encode()
    head += b" " * (-(len(head) + 1) % 4) + b"\n"
    return head + b"".join(np.ascontiguousarray(array, dtype="<f4").tobytes() for array in arrays)


def to_course(
    names: Sequence[str], first_C: list[int], last_C: list[int], own_CS: np.ndarray, usual_CS: np.ndarray
) -> dict[str, Any]:
    """Values of a rank or link beside the usual: S series, C columns, each of several windows. NaN becomes null."""
    return {
        "first": first_C,
        "last": last_C,
        "series": {name: _rounded(own_CS[:, s]) for s, name in enumerate(names)},
        "usual": {name: _rounded(usual_CS[:, s]) for s, name in enumerate(names)},
    }


def _rounded(values: np.ndarray) -> list[float | None]:
    return [round(float(value), 4) if np.isfinite(value) else None for value in values]
