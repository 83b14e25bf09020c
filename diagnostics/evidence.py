"""What speaks for a finding, what caused it, and what to do: the words and numbers around an outlier.

A rank that computes too long arrives late, so others wait for it while it waits for nobody: its column is high, its row
low. A slow link leaves both ends' rows alone. A wait that grows with the tokens received is load, not wire.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from .matrices import WindowMatrices

LOW_ROW, HIGH_COMPUTE, LOW_COMPUTE, HIGH_TOKENS = 0.75, 1.2, 0.8, 1.5


class Place(NamedTuple):
    """What stands out: a "column" or "row" (of `rank`), or a "point" (`src` waits for `dst`)."""

    kind: str
    rank: int | None
    src: int | None
    dst: int | None


@dataclass(frozen=True)
class Evidence:
    """Ratios are to the median rank (for tokens: to the median pair). wait_us: per call. windows: seen in, of total."""

    place: Place
    ratio: float
    wait_us: float
    row_ratio: float
    compute_ratio: float
    token_ratio: float
    num_windows: int
    num_windows_total: int

    @staticmethod
    def gather(
        matrices: WindowMatrices, windows: Sequence[int], place: Place, row_ratio_N: np.ndarray, ratio: float
    ) -> "Evidence":
        wait_us_NN = nan_median(matrices.wait_us_WNN[windows])
        tokens_NN = nan_median(matrices.recv_tokens_WNN[windows])
        compute_us_N = nan_median(matrices.compute_us_WN[windows])
        off_diagonal = ~np.eye(matrices.num_ranks, dtype=bool)
        if place.kind == "point":
            where = (np.array([place.src]), np.array([place.dst]))
            rank = place.dst
        elif place.kind == "column":
            where = np.nonzero(off_diagonal & (np.arange(matrices.num_ranks)[None, :] == place.rank))
            rank = place.rank
        else:
            where = np.nonzero(off_diagonal & (np.arange(matrices.num_ranks)[:, None] == place.rank))
            rank = place.rank
        return Evidence(
            place=place,
            ratio=ratio,
            wait_us=float(np.nanmedian(wait_us_NN[where])),
            row_ratio=float(row_ratio_N[rank]),
            compute_ratio=_ratio(float(compute_us_N[rank]), compute_us_N),
            token_ratio=_ratio(float(np.nanmedian(tokens_NN[where])), tokens_NN[off_diagonal]),
            num_windows=len(windows),
            num_windows_total=len(matrices.window_W),
        )

    def cause(self) -> str:
        if self.place.kind == "column":
            late, busy = self.row_ratio <= LOW_ROW, self.compute_ratio >= HIGH_COMPUTE
            return "comp" if late else "mixed" if busy else "comm"
        if self.place.kind == "row":
            return "comp" if self.compute_ratio <= LOW_COMPUTE else "comm"
        return "mixed" if self.token_ratio >= HIGH_TOKENS else "comm"

    def text(self) -> str:
        seen = f"in {self.num_windows} of {self.num_windows_total} windows"
        kind, rank, src, dst = self.place
        what = {
            "column": f"the others wait {self.ratio:.2g}x as long for rank {rank} as for its peers",
            "row": f"rank {rank} waits {self.ratio:.2g}x as long as its peers, for everyone",
            "point": f"rank {src} waits {self.ratio:.2g}x as long for rank {dst} as both ends explain",
        }[kind]
        whose = f"rank {dst if kind == 'point' else rank}"
        return (
            f"{what} ({self.wait_us:.0f} us per call) {seen}; of the median, {whose} computes "
            f"{self.compute_ratio:.2g}x, itself waits {self.row_ratio:.2g}x, links carry {self.token_ratio:.2g}x"
        )


_ADVICE = {
    ("column", "comp"): "the rank arrives late: look for a throttled or shared processor, or hot experts on it "
    "(eprt balance)",
    (
        "column",
        "comm",
    ): "the rank computes in time but its messages come late: check its network card, its links and what "
    "else uses them",
    ("column", "mixed"): "the rank computes long and waits like its peers: check its load first, then its links",
    ("row", "comp"): "the rank has less to compute than its peers, so it waits for them: even out the experts "
    "(eprt balance)",
    ("row", "comm"): "the rank receives slowly from everyone: check its network card and what else runs on its cores",
    (
        "point",
        "comm",
    ): "one direction of one link is slow: check the cable, the port or the route between the two ranks",
    ("point", "mixed"): "more tokens than usual cross this link: look at the routing before the wire",
}


def advice(kind: str, cause: str) -> str:
    return _ADVICE[kind, cause]


def nan_median(values: np.ndarray) -> np.ndarray:
    """Median over the first axis, NaN left out; NaN where nothing is left."""
    known = ~np.isnan(values).all(axis=0)
    out = np.full(values.shape[1:], np.nan)
    out[known] = np.nanmedian(values[:, known], axis=0)
    return out


def _ratio(value: float, values: np.ndarray) -> float:
    """value over the median; 1 when there is nothing to compare with."""
    known = values[~np.isnan(values)]
    usual = float(np.median(known)) if len(known) else 0.0
    return float(value) / usual if usual > 0 and not np.isnan(value) else 1.0
