"""What speaks for a finding, what caused it, and what to do: the words and numbers around an outlier.

A rank that computes too long arrives late, so others wait for it while it waits for nobody: its column is high, its row
low. A rank whose messages come late gets its answers late too: its row is not low. A wait that grows with the tokens is
load, not wire.
"""

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from .chance import HIGH_Z
from .detector import Outliers, Place, Sighting
from .effects import Effects, median
from .matrices import WindowMatrices

HIGH_COMPUTE, LOW_COMPUTE = 1.25, 0.8
LOW_ROW, LOW_ROW_Z = 0.93, -2.5
SPARED, SHARES_IT = 0.5, 0.2  # of what the others wait longer, a late rank is spared, and a late sender is not
COMPUTE_EXPLAINS = 0.5  # of what the others wait longer
IDLE, LIKE_IT = 0.1, 0.67  # of a rank's own tokens
HIGH_TOKENS, TOKENS_EXPLAIN = 1.3, 0.5  # of the wait's logarithm


class Yardstick:
    """Looks up, over the windows of a sighting, what is usual and how far a rank or link is from it."""

    def __init__(self, matrices: WindowMatrices, outliers: Outliers):
        self.matrices, self.outliers = matrices, outliers

    @cached_property
    def _phases(self) -> tuple[Effects, Effects]:
        """Of dispatch and of combine."""
        matrices, node_N = self.matrices, self.matrices.node_of_rank_N
        return Effects.of(matrices.dispatch_us_WNN, node_N), Effects.of(matrices.combine_us_WNN, node_N)

    def _at(self, sighting: Sighting) -> slice:
        return slice(sighting.first, sighting.last + 1)

    def wait_us(self, sighting: Sighting) -> float:
        """Median wait per call at the place."""
        return _median_of(self._waits_WX(self.matrices.wait_us_WNN, sighting))

    def excess_us(self, sighting: Sighting) -> float:
        """How much of it is above the usual."""
        return self.wait_us(sighting) * (1 - 1 / max(1.0, sighting.ratio))

    def _waits_WX(self, values_WNN: np.ndarray, sighting: Sighting) -> np.ndarray:
        kind, rank, src, dst = sighting.place
        values = values_WNN[self._at(sighting)]
        others = np.arange(self.matrices.num_ranks) != rank
        return (
            values[:, src, dst]
            if kind == "point"
            else values[:, others, rank]
            if kind == "column"
            else values[:, rank, others]
        )

    def only_waiter(self, sighting: Sighting) -> int | None:
        """The rank that alone tells of waits in these windows, if only one does."""
        waits_WNN = self.matrices.wait_us_WNN[self._at(sighting)]
        told = np.flatnonzero(~np.isnan(waits_WNN).all(axis=(0, 2)))
        return int(told[0]) if len(told) == 1 else None

    def links_into(self, column: Sighting) -> list[Sighting]:
        """The link on which the column's rank itself waits longest, where that stands out in most of these windows."""
        at, rank = self._at(column), column.place.rank
        z_N = nan_median(self.outliers.point_z_WNN[at, rank])
        slow = np.flatnonzero(np.nan_to_num(z_N) >= HIGH_Z)
        if rank is None or not len(slow):
            return []
        dst = int(max(slow, key=lambda j: _median_of(self.matrices.wait_us_WNN[at, rank, j])))
        ratio = _median_of(self.outliers.point_ratio_WNN[at, rank, dst])
        return [Sighting(Place("point", None, rank, dst), column.first, column.last, float(z_N[dst]), ratio)]

    def _own_tokens_N(self, sighting: Sighting) -> np.ndarray:
        return _median_over(_sum(self.matrices.sent_tokens_WNN[self._at(sighting)], 2))

    def own_tokens(self, sighting: Sighting) -> float:
        """Tokens that a row's or column's rank sent, over the median rank's; infinite where half of the ranks are as
        good as idle beside it."""
        own_N, rank = self._own_tokens_N(sighting), sighting.place.rank
        if rank is None or math.isnan(own_N[rank]):
            return 1.0
        known = np.sort(own_N[~np.isnan(own_N)])
        if known[(len(known) - 1) // 2] < IDLE * own_N[rank]:
            return math.inf
        return _share(own_N, rank)

    def beyond_peers(self, column: Sighting) -> float:
        """Its ratio over that of the ranks that have at least LIKE_IT of its own tokens; 0 where there are none."""
        own_N, rank = self._own_tokens_N(column), column.place.rank
        are_peers_N = own_N >= LIKE_IT * own_N[rank]
        are_peers_N[rank] = False
        usual = _median_of(nan_median(self.outliers.column_ratio_WN[self._at(column)])[are_peers_N])
        return column.ratio / usual if usual > 0 else 0.0

    def tokens(self, sighting: Sighting) -> float:
        """Tokens that may explain the wait, over the usual: of the link, or the larger of what a rank got and sent."""
        received_WNN = self.matrices.recv_tokens_WNN[self._at(sighting)]
        if sighting.place.kind == "point":
            usual = _median_over(received_WNN)
            off_diagonal = usual[~np.eye(len(usual), dtype=bool)]
            middle = _median_of(off_diagonal)
            return float(usual[sighting.place.src, sighting.place.dst]) / middle if middle > 0 else 1.0
        received_N = _median_over(_sum(received_WNN, 2))
        sent_N = _median_over(_sum(received_WNN, 1))
        rank = sighting.place.rank
        return (
            _share(received_N, rank)
            if sighting.place.kind == "row"
            else max(_share(received_N, rank), _share(sent_N, rank))
        )

    def compute(self, sighting: Sighting) -> float:
        """Time in the experts over the median rank's."""
        rank = sighting.place.rank if sighting.place.rank is not None else sighting.place.dst
        return _share(_median_over(self.matrices.compute_us_WN[self._at(sighting)]), rank)

    def compute_share(self, sighting: Sighting) -> float:
        """What of the longer wait the rank's longer time in the experts makes up."""
        compute_us_N, rank = _median_over(self.matrices.compute_us_WN[self._at(sighting)]), sighting.place.rank
        more_us = 0.0 if rank is None else np.nan_to_num(compute_us_N[rank] - _median_of(compute_us_N))
        return float(more_us) / max(1e-9, self.excess_us(sighting))

    def blocked(self, sighting: Sighting) -> tuple[float, float]:
        """How long a column's rank waited at all: (over the median of the others; how much of what they wait longer
        for it the rank itself was spared). NaN where the log does not tell.

        Who comes late finds everybody there and is spared it all. Whose messages come late to the others then waits
        for those whom they made late: in the next phase, and as long.
        """
        rank, excess_us = sighting.place.rank, self.excess_us(sighting)
        blocked_us_WN = self.matrices.blocked_us_WN[self._at(sighting)]
        own_us_W = blocked_us_WN[:, rank]
        others_us_W = median(np.delete(blocked_us_WN, rank or 0, axis=1), 1)
        if rank is None or np.isnan(own_us_W - others_us_W).all() or excess_us <= 0:
            return math.nan, math.nan
        usual_us = _median_of(others_us_W)
        ratio = _median_of(own_us_W) / usual_us if usual_us > 0 else math.nan
        return ratio, _median_of(others_us_W - own_us_W) / excess_us

    def row(self, sighting: Sighting) -> tuple[float, float]:
        """A column's own row: (ratio, z), in the phase where the others wait longest for it.

        Compared with the other ranks and, where the log has windows before or after, with what it was then: ranks
        differ by nature.
        """
        rank, at = sighting.place.rank, self._at(sighting)
        if rank is None:
            return 1.0, 0.0
        parts = (self.matrices.dispatch_us_WNN, self.matrices.combine_us_WNN)
        waits = [_median_of(self._waits_WX(part, sighting)) for part in parts]
        effects = self._phases[int(waits[1] > waits[0])]
        row_W, error = effects.row_WN[:, rank], _median_of(effects.rank_error_W1[at])
        during, num_during = _median_of(row_W[at]), sighting.last - sighting.first + 1
        outside_W = np.delete(row_W, np.arange(sighting.first, sighting.last + 1))
        outside_W = outside_W[~np.isnan(outside_W)]
        if len(outside_W) < 3:
            return math.exp(during), during / (error / math.sqrt(min(num_during, 4)))
        error *= math.sqrt(1 / min(num_during, 4) + 1 / min(len(outside_W), 4))
        change = during - float(np.median(outside_W))
        return math.exp(change), change / error


@dataclass(frozen=True)
class Evidence:
    """Ratios are to the median rank (for tokens of a point: to the median pair). wait_us: per call."""

    sighting: Sighting
    wait_us: float
    row_ratio: float
    row_z: float
    compute_ratio: float
    compute_share: float
    token_ratio: float
    blocked_ratio: float
    spared: float
    seen: str

    @staticmethod
    def gather(yardstick: Yardstick, sighting: Sighting) -> "Evidence":
        row_ratio, row_z = yardstick.row(sighting)
        blocked_ratio, spared = yardstick.blocked(sighting) if sighting.place.kind == "column" else (math.nan, math.nan)
        return Evidence(
            sighting=sighting,
            wait_us=yardstick.wait_us(sighting),
            row_ratio=row_ratio,
            row_z=row_z,
            compute_ratio=yardstick.compute(sighting),
            compute_share=yardstick.compute_share(sighting),
            token_ratio=yardstick.tokens(sighting),
            blocked_ratio=blocked_ratio,
            spared=spared,
            seen=_when(yardstick.matrices, sighting),
        )

    def cause(self) -> str:
        explained = math.log(max(self.token_ratio, 1e-9)) >= TOKENS_EXPLAIN * math.log(max(self.sighting.ratio, 1.01))
        if self.token_ratio >= HIGH_TOKENS and explained:
            return "mixed"
        if self.sighting.place.kind == "column":
            late = self.row_ratio <= LOW_ROW and self.row_z <= LOW_ROW_Z
            computes_longer = self.compute_ratio >= HIGH_COMPUTE
            if self.spared >= SPARED:
                late = True
            elif self.spared <= SHARES_IT:  # it is not late; a little more in the experts is not what all wait for
                late, computes_longer = False, computes_longer and self.compute_share >= COMPUTE_EXPLAINS
            return "comp" if late or computes_longer else "comm"
        if self.sighting.place.kind == "row":
            return "comp" if self.compute_ratio <= LOW_COMPUTE else "comm"
        return "comm"

    def text(self) -> str:
        kind, rank, src, dst = self.sighting.place
        ratio = self.sighting.ratio
        what = {
            "column": f"the others wait {ratio:.2g}x as long for rank {rank} as for its peers",
            "row": f"rank {rank} waits {ratio:.2g}x as long as its peers, for everyone",
            "point": f"rank {src} waits {ratio:.2g}x as long for rank {dst} as both ends explain",
        }[kind]
        rest = f"rank {dst if kind == 'point' else rank} computes {self.compute_ratio:.2g}x"
        if kind == "column":
            known = not math.isnan(self.blocked_ratio)
            rest += f", itself waits {self.blocked_ratio if known else self.row_ratio:.2g}x"
        rest += f", {'the link carries' if kind == 'point' else 'has'} {self.token_ratio:.2g}x the tokens"
        return f"{what} ({self.wait_us:.0f} us per call) {self.seen}; of the usual, {rest}"


def _when(matrices: WindowMatrices, sighting: Sighting) -> str:
    num = int(matrices.num_windows_W[sighting.first : sighting.last + 1].sum())
    total = int(matrices.num_windows_W.sum())
    if num == total:
        return "in all windows" if total > 1 else "in the only window"
    since = matrices.start_s_W[sighting.first] - matrices.start_s_W[0]
    until = matrices.end_s_W[sighting.last] - matrices.start_s_W[0]
    end = "to the end" if sighting.last == len(matrices.window_W) - 1 else f"to {until:.0f} s, then recovered"
    return f"in {num} of {total} windows, from {since:.0f} s {end}"


_ADVICE = {
    ("column", "comp"): "the rank arrives late: look for a throttled, shared or paused processor (its clock, other "
    "processes, its host)",
    ("column", "comm"): "the rank computes in time but its messages come late: check its network card, its links and "
    "what else uses them",
    ("column", "mixed"): "the rank has more tokens than its peers and takes longer for them: even out the experts "
    "(eprt balance) or the requests",
    ("row", "comp"): "the rank has less to compute than its peers, so it waits for them: even out the experts "
    "(eprt balance)",
    ("row", "comm"): "the rank receives slowly from everyone: check its network card and what else runs on its cores",
    ("row", "mixed"): "the rank receives more tokens than its peers, all at once (incast): even out the experts "
    "(eprt balance)",
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
    return median(values, 0)


_median_over = nan_median


def _median_of(values: np.ndarray) -> float:
    known = values[~np.isnan(values)]
    return float(np.median(known)) if known.size else 0.0


def _sum(values: np.ndarray, axis: int) -> np.ndarray:
    """NaN where nothing is known."""
    return np.where(np.isnan(values).all(axis=axis), np.nan, np.nansum(values, axis=axis))


def _share(values_N: np.ndarray, rank: int | None) -> float:
    """A rank's value over the median rank's; 1 when there is nothing to compare with."""
    usual = _median_of(values_N)
    if rank is None or usual <= 0 or math.isnan(values_N[rank]):
        return 1.0
    return float(values_N[rank]) / usual
