"""Yardstick: how far a rank or link is from what is usual, over the windows in which it stands out."""

import math
from functools import cached_property

import numpy as np

from ..windows.matrices import WindowMatrices
from .chance import HIGH_Z
from .detector import Outliers, Place, Sighting
from .effects import Effects, median

IDLE, LIKE_IT = 0.1, 0.67  # of a rank's own tokens


class Yardstick:
    """All figures are medians over the windows of a sighting; NaN entries do not count."""

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
        """Of the place: [W] of a point, [W, N - 1] of a column or row."""
        kind, rank, src, dst = sighting.place
        values_WNN = values_WNN[self._at(sighting)]
        if kind == "point":
            return values_WNN[:, src, dst]
        others = np.arange(self.matrices.num_ranks) != rank
        return values_WNN[:, others, rank] if kind == "column" else values_WNN[:, rank, others]

    def only_waiter(self, sighting: Sighting) -> int | None:
        """The rank that alone tells of waits in these windows, if only one does."""
        waits_WNN = self.matrices.wait_us_WNN[self._at(sighting)]
        told = np.flatnonzero(~np.isnan(waits_WNN).all(axis=(0, 2)))
        return int(told[0]) if len(told) == 1 else None

    def links_into(self, column: Sighting) -> list[Sighting]:
        """The link on which the column's rank itself waits longest, where that stands out in most of these windows."""
        at, rank = self._at(column), column.place.rank
        z_N = median(self.outliers.point_z_WNN[at, rank], 0)
        slow = np.flatnonzero(np.nan_to_num(z_N) >= HIGH_Z)
        if rank is None or not len(slow):
            return []
        dst = int(max(slow, key=lambda j: _median_of(self.matrices.wait_us_WNN[at, rank, j])))
        ratio = _median_of(self.outliers.point_ratio_WNN[at, rank, dst])
        return [Sighting(Place("point", None, rank, dst), column.first, column.last, float(z_N[dst]), ratio)]

    def _own_tokens_N(self, sighting: Sighting) -> np.ndarray:
        """Tokens that each rank sent, per call."""
        return median(_sum(self.matrices.sent_tokens_WNN[self._at(sighting)], 2), 0)

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
        usual = _median_of(median(self.outliers.column_ratio_WN[self._at(column)], 0)[are_peers_N])
        return column.ratio / usual if usual > 0 else 0.0

    def tokens(self, sighting: Sighting) -> float:
        """Tokens that may explain the wait, over the usual: of the link, or the larger of what a rank got and sent."""
        received_WNN = self.matrices.recv_tokens_WNN[self._at(sighting)]
        if sighting.place.kind == "point":
            usual_NN = median(received_WNN, 0)
            middle = _median_of(usual_NN[~np.eye(len(usual_NN), dtype=bool)])
            return float(usual_NN[sighting.place.src, sighting.place.dst]) / middle if middle > 0 else 1.0
        received, sent = (_share(median(_sum(received_WNN, axis), 0), sighting.place.rank) for axis in (2, 1))
        return received if sighting.place.kind == "row" else max(received, sent)

    def compute(self, sighting: Sighting) -> float:
        """Time in the experts over the median rank's."""
        rank = sighting.place.rank if sighting.place.rank is not None else sighting.place.dst
        return _share(median(self.matrices.compute_us_WN[self._at(sighting)], 0), rank)

    def compute_share(self, sighting: Sighting) -> float:
        """What of the longer wait the rank's longer time in the experts makes up."""
        compute_us_N, rank = median(self.matrices.compute_us_WN[self._at(sighting)], 0), sighting.place.rank
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


def _median_of(values: np.ndarray) -> float:
    """Of all that is known; 0 when nothing is."""
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
