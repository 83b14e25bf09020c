"""Window: what all ranks logged for one window, as matrices per call; Totals: the same over many windows.

Planes, in this order: dispatch (us), combine (us), tokens (received). [i][j] belongs to waiting rank i, awaited rank j.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..log.events import WindowRecord
from .matrices import WindowMatrices

PLANES = ("dispatch", "combine", "tokens")


@dataclass(frozen=True, eq=False)
class Window:
    """number: None where it sums up several. t_start, t_end: Unix time, seconds. P planes, N ranks; NaN: no data.

    planes_PNN: per call. compute_us_N: time in the experts per call. calls_N: dispatch + combine pairs.
    """

    number: int | None
    t_start: float
    t_end: float
    planes_PNN: np.ndarray
    compute_us_N: np.ndarray
    calls_N: np.ndarray

    @property
    def num_ranks(self) -> int:
        return len(self.calls_N)

    @staticmethod
    def of(records: Sequence[WindowRecord]) -> "Window":
        """records: of one window, at least one, each rank at most once."""
        totals = Totals(records[0].num_ranks)
        for record in records:
            totals.add(record)
        return totals.window(records[0].window)

    @staticmethod
    def over(matrices: WindowMatrices) -> "Window":
        """All windows of the matrices together, per call."""
        calls_WN = matrices.calls_WN
        calls_N = np.where(calls_WN.sum(axis=0) > 0, calls_WN.sum(axis=0), np.nan)
        per_pair = (matrices.dispatch_us_WNN, matrices.combine_us_WNN, matrices.recv_tokens_WNN)
        planes_PNN = np.stack([np.nansum(x_WNN * calls_WN[:, :, None], axis=0) for x_WNN in per_pair])
        compute_us_N = np.nansum(matrices.compute_us_WN * calls_WN, axis=0)
        times = float(matrices.start_s_W.min()), float(matrices.end_s_W.max())
        return Window(None, *times, planes_PNN / calls_N[None, :, None], compute_us_N / calls_N, calls_WN.sum(axis=0))

    def pack(self, **header) -> bytes:
        """What the page reads: planes, compute and calls as float32 behind a line of JSON."""
        head = {"window": self.number, "t_start": self.t_start, "t_end": self.t_end, "num_ranks": self.num_ranks}
        return pack({**head, "planes": PLANES, **header}, self.planes_PNN, self.compute_us_N, self.calls_N)


class Totals:
    """Sums over records of any windows of one job; as a Window they are averages over all calls."""

    def __init__(self, num_ranks: int):
        self._sums_PNN = np.zeros((len(PLANES), num_ranks, num_ranks))
        self._compute_us_N, self._calls_N = np.zeros(num_ranks), np.zeros(num_ranks)
        self._t_start, self._t_end = np.inf, -np.inf

    def add(self, record: WindowRecord) -> None:
        rank = record.rank
        self._sums_PNN[:, rank] += np.array((record.dispatch_wait_us, record.combine_wait_us, record.recv_tokens))
        self._compute_us_N[rank] += record.compute_us
        self._calls_N[rank] += record.num_calls
        self._t_start, self._t_end = min(self._t_start, record.t_start), max(self._t_end, record.t_end)

    def window(self, number: int | None = None) -> Window:
        calls_N = np.where(self._calls_N > 0, self._calls_N, np.nan)
        planes_PNN = self._sums_PNN / calls_N[None, :, None]
        t_start, t_end = (self._t_start, self._t_end) if np.isfinite(self._t_start) else (0.0, 0.0)
        return Window(number, t_start, t_end, planes_PNN, self._compute_us_N / calls_N, self._calls_N.copy())


def pack(header: dict, *arrays: np.ndarray) -> bytes:
    """One line of JSON, padded so that the float32 arrays (little-endian, one after the other) start at 4 bytes."""
    head = json.dumps(header, separators=(",", ":"), allow_nan=False).encode()
    head += b" " * (-(len(head) + 1) % 4) + b"\n"
    return head + b"".join(np.ascontiguousarray(array, dtype="<f4").tobytes() for array in arrays)
