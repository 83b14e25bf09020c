"""Yardstick: figures of a sighting compared with the usual ones. Measures, and draws no conclusion."""

import math
from functools import cached_property

import numpy as np

from ..windows.matrices import WindowMatrices
from ..windows.medians import median, median_of_known
from .chance import HIGH_Z
from .effects import FLOOR_US, Effects
from .lateness import Lateness, spared_us
from .past import MIN_PAST
from .sightings import Outliers, Place, Sighting
from .topology import BETWEEN_ALL, LinkTopology

IDLE, PEER = 0.1, 0.67  # of a rank's own tokens: a rank with fewer is as good as idle; with more, a peer


class Yardstick:
    """All figures are medians over the windows of a sighting; NaN entries do not count."""

    def __init__(self, matrices: WindowMatrices, outliers: Outliers, topology: LinkTopology | None = None):
        self.matrices, self.outliers = matrices, outliers
        self._topology = topology or LinkTopology.from_nodes(matrices.node_of_rank_N)

    @cached_property
    def _phases(self) -> tuple[Effects, Effects]:
        """Of dispatch and of combine."""
        tier_NN, matrices = self._topology.alike_NN, self.matrices
        return Effects.from_waits(matrices.dispatch_us_WNN, tier_NN), Effects.from_waits(
            matrices.combine_us_WNN, tier_NN
        )

    @cached_property
    def _lateness(self) -> Lateness:
        return Lateness.from_waits(self.matrices.dispatch_us_WNN, self.matrices.combine_us_WNN)

    def _windows_of(self, sighting: Sighting) -> slice:
        return slice(sighting.first, sighting.last + 1)

    def wait_us(self, sighting: Sighting) -> float:
        """Median wait per call at the place."""
        return median_of_known(self._waits_WX(self.matrices.wait_us_WNN, sighting))

    def excess_us(self, sighting: Sighting) -> float:
        """How much of it is above the usual."""
        return self.wait_us(sighting) * (1 - 1 / max(1.0, sighting.ratio))

    def _waits_WX(self, values_WNN: np.ndarray, sighting: Sighting) -> np.ndarray:
        """Of the place: [W] of a point, [W, N - 1] of a column or row."""
        kind, rank, src, dst, *_ = sighting.place
        values_WNN = values_WNN[self._windows_of(sighting)]
        if kind not in ("column", "row", "point"):
            return values_WNN[:, self.links_of(sighting.place)]
        if kind == "point":
            return values_WNN[:, src, dst]
        others = np.arange(self.matrices.num_ranks) != rank
        return values_WNN[:, others, rank] if kind == "column" else values_WNN[:, rank, others]

    def links_of(self, place: Place) -> np.ndarray:
        """[N, N] of a place that is wider than a rank or a link: whether the link is part of it."""
        node_N, tier_NN = self.matrices.node_of_rank_N, self._topology.tier_NN
        if place.kind == "node":
            return np.isin(node_N, place.nodes) & ~np.isin(node_N, place.nodes)[:, None]
        if place.kind == "path":
            ends_NN = np.sort(np.stack(np.broadcast_arrays(node_N[:, None], node_N)), axis=0)
            return (ends_NN[0] == place.nodes[0]) & (ends_NN[1] == place.nodes[1])
        if place.tier == BETWEEN_ALL:
            return node_N[:, None] != node_N
        if place.kind == "tier":
            return tier_NN == self._topology.names.index(str(place.tier))
        return tier_NN >= 0

    def waits_between(self, sighting: Sighting, nodes: tuple[int, int]) -> tuple[float, float]:
        """Median waits in a sighting's windows: between two nodes, the shorter way, and of the other nodes for the two
        (0 where there are no others)."""
        waits_WNN, node_N = self.matrices.wait_us_WNN[self._windows_of(sighting)], self.matrices.node_of_rank_N
        ends = [node_N == node for node in nodes]
        ways_us = [median_of_known(waits_WNN[:, i][:, :, j]) for i, j in (ends, ends[::-1])]
        is_other_N = ~(ends[0] | ends[1])
        return min(ways_us), median_of_known(waits_WNN[:, is_other_N][:, :, ~is_other_N])

    def ratio_without(self, wide: Sighting, rank: int) -> float:
        """The median wait of a wide place over that in the other windows, without the links of a rank; 1 where nothing
        is left or known."""
        links_NN = self.links_of(wide.place)
        links_NN[rank] = links_NN[:, rank] = False
        if not links_NN.any() or not self._has_past(wide):
            return 1.0
        waits_WX = self.matrices.wait_us_WNN[:, links_NN]
        usual_us = median_of_known(self._outside(waits_WX, wide))
        return median_of_known(waits_WX[self._windows_of(wide)]) / usual_us if usual_us > 0 else 1.0

    def column_ratio(self, row: Sighting) -> float:
        """How long the others wait for the row's rank, over what is usual among its peers or was before, the lower."""
        ratio_W = self.outliers.column_ratio_WN[:, row.place.rank]
        during, before_W = median_of_known(ratio_W[self._windows_of(row)]), ratio_W[: row.first]
        usual = median_of_known(before_W) if len(before_W) >= MIN_PAST else 1.0
        return during / max(1.0, usual)

    def only_waiter(self, sighting: Sighting) -> int | None:
        """The only rank that reported waits in these windows, if there is only one."""
        waits_WNN = self.matrices.wait_us_WNN[self._windows_of(sighting)]
        reporting = np.flatnonzero(~np.isnan(waits_WNN).all(axis=(0, 2)))
        return int(reporting[0]) if len(reporting) == 1 else None

    def links_into(self, column: Sighting) -> list[Sighting]:
        """The link on which the column's rank itself waits longest, if the link stands out in most of these windows."""
        at, rank = self._windows_of(column), column.place.rank
        z_N = median(self.outliers.point_z_WNN[at, rank], 0)
        slow = np.flatnonzero(np.nan_to_num(z_N) >= HIGH_Z)
        if rank is None or not len(slow):
            return []
        dst = int(max(slow, key=lambda j: median_of_known(self.matrices.wait_us_WNN[at, rank, j])))
        ratio = median_of_known(self.outliers.point_ratio_WNN[at, rank, dst])
        return [Sighting(Place("point", None, rank, dst), column.first, column.last, float(z_N[dst]), ratio)]

    def _own_tokens_N(self, sighting: Sighting) -> np.ndarray:
        """Tokens that each rank sent, per call."""
        return median(_sum_of_known(self.matrices.sent_tokens_WNN[self._windows_of(sighting)], 2), 0)

    def own_tokens(self, sighting: Sighting) -> float:
        """Tokens that a row's or column's rank sent, over the median rank's; infinite where half of the ranks are as
        good as idle compared with it."""
        own_N, rank = self._own_tokens_N(sighting), sighting.place.rank
        if rank is None or math.isnan(own_N[rank]):
            return 1.0
        known = np.sort(own_N[~np.isnan(own_N)])
        if known[(len(known) - 1) // 2] < IDLE * own_N[rank]:
            return math.inf
        return _over_median(own_N, rank)

    def beyond_peers(self, column: Sighting) -> float:
        """Its ratio over that of the ranks that have at least PEER of its own tokens; 0 where there are none."""
        own_N, rank = self._own_tokens_N(column), column.place.rank
        are_peers_N = own_N >= PEER * own_N[rank]
        are_peers_N[rank] = False
        usual = median_of_known(median(self.outliers.column_ratio_WN[self._windows_of(column)], 0)[are_peers_N])
        return column.ratio / usual if usual > 0 else 0.0

    def tokens(self, sighting: Sighting) -> float:
        """Tokens that may explain the wait, over the usual: of the link, or the larger of those received and sent."""
        received_WNN = self.matrices.recv_tokens_WNN[self._windows_of(sighting)]
        if sighting.place.kind == "point":
            usual_NN = median(received_WNN, 0)
            middle = median_of_known(usual_NN[~np.eye(len(usual_NN), dtype=bool)])
            return float(usual_NN[sighting.place.src, sighting.place.dst]) / middle if middle > 0 else 1.0
        received, sent = (
            _over_median(median(_sum_of_known(received_WNN, axis), 0), sighting.place.rank) for axis in (2, 1)
        )
        return received if sighting.place.kind == "row" else max(received, sent)

    def compute(self, sighting: Sighting) -> float:
        """Time in the experts over the median rank's."""
        rank = sighting.place.rank if sighting.place.rank is not None else sighting.place.dst
        return _over_median(median(self.matrices.compute_us_WN[self._windows_of(sighting)], 0), rank)

    def compute_share(self, sighting: Sighting) -> float:
        """The part of the longer wait that the rank's longer time in the experts makes up."""
        compute_us_N, rank = median(self.matrices.compute_us_WN[self._windows_of(sighting)], 0), sighting.place.rank
        more_us = 0.0 if rank is None else np.nan_to_num(compute_us_N[rank] - median_of_known(compute_us_N))
        return float(more_us) / max(1e-9, self.excess_us(sighting))

    def blocked(self, sighting: Sighting) -> tuple[float, float]:
        """How long a column's rank waited at all: (over the median of the others; the part of their extra wait that
        the rank itself was spared). NaN where it is not logged.

        A rank that arrives late finds everybody there and is spared all of it. A rank whose messages are late then
        waits for the ranks that they made late: in the next phase, and as long.
        """
        rank, excess_us = sighting.place.rank, self.excess_us(sighting)
        blocked_us_WN = self.matrices.blocked_us_WN[self._windows_of(sighting)]
        own_us_W = blocked_us_WN[:, rank]
        others_us_W = median(np.delete(blocked_us_WN, rank or 0, axis=1), 1)
        if rank is None or np.isnan(own_us_W - others_us_W).all() or excess_us <= 0:
            return math.nan, math.nan
        usual_us = median_of_known(others_us_W)
        ratio = median_of_known(own_us_W) / usual_us if usual_us > 0 else math.nan
        return ratio, median_of_known(others_us_W - own_us_W) / excess_us

    def own_lateness(self, column: Sighting) -> tuple[float, float]:
        """What a late rank adds to its lateness itself, by working longer or by late messages: (the part of it, the
        same over the usual wait for the rank). The rest it inherits from who or what made it late: a slow link into
        it, say. NaN where it is not logged.

        A rank that is late by itself waits less than the others. Messages that are late by themselves are not early at
        the other end: the rank's own waits are not shorter by as much as the waits for it are longer.
        """
        rank = column.place.rank
        if rank is None or np.isnan(self.matrices.blocked_us_WN[self._windows_of(column)]).all():
            return math.nan, math.nan
        if self._has_past(column):
            changes = (
                self._change_N(values_WN, column)
                for values_WN in (self._lateness.column_us_WN, self._lateness.messages_us_WN)
            )
            late_us, messages_us = (float(change_N[rank]) for change_N in changes)
            usual_us = median_of_known(self._outside(self._lateness.awaited_us_WN, column)[:, rank])
        else:
            late_us, messages_us, usual_us = self._beside_alike(column, rank)
        own_us = float(np.fmax(self._spared_us_N(column)[rank], messages_us))
        return own_us / max(1e-9, late_us), own_us / max(FLOOR_US, usual_us)

    def _beside_alike(self, column: Sighting, rank: int) -> tuple[float, float, float]:
        """How late a rank is, its messages are, and what is usual, beside links that are alike: without a past."""
        during_NN, tier_NN = median(self.matrices.wait_us_WNN[self._windows_of(column)], 0), self._topology.alike_NN
        np.fill_diagonal(during_NN, np.nan)
        usual_NN = np.full(during_NN.shape, np.nan)
        for tier in np.unique(tier_NN[tier_NN >= 0]):
            usual_NN[tier_NN == tier] = median_of_known(during_NN[tier_NN == tier])
        late_N = median(during_NN - usual_NN, 0)
        waits_N = np.nanmean(during_NN - usual_NN - late_N, axis=1)
        late_us = float(late_N[rank] - median_of_known(late_N))
        return late_us, late_us + float(waits_N[rank] - median_of_known(waits_N)), float(np.nanmean(usual_NN[:, rank]))

    def late_messages(self, column: Sighting) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
        """Of each rank in a column's windows: how much later it is than before, how much longer its messages take, and
        in which part of the windows they take longer. None without a past."""
        if not self._has_past(column):
            return None
        message_us_WN = self._lateness.messages_us_WN
        is_longer_WN = message_us_WN[self._windows_of(column)] > median(self._outside(message_us_WN, column), 0)
        late_us_N = self._change_N(self._lateness.column_us_WN, column)
        return late_us_N, self._change_N(message_us_WN, column), is_longer_WN.mean(axis=0)

    def works_less(self, row: Sighting) -> float:
        """The part of a row's longer wait that the rank's own shorter work makes up; NaN where it is not logged."""
        if row.place.rank is None or np.isnan(self.matrices.blocked_us_WN[self._windows_of(row)]).all():
            return math.nan
        return float(-self._spared_us_N(row)[row.place.rank]) / max(1e-9, self.excess_us(row))

    def _spared_us_N(self, sighting: Sighting) -> np.ndarray:
        """How much less each rank waits at all than the others; where there is a past, than it did before."""
        spared_us_WN = spared_us(self.matrices.blocked_us_WN)
        if self._has_past(sighting):
            return self._change_N(spared_us_WN, sighting)
        return median(spared_us_WN[self._windows_of(sighting)], 0)

    def _change_N(self, values_WN: np.ndarray, sighting: Sighting) -> np.ndarray:
        return median(values_WN[self._windows_of(sighting)], 0) - median(self._outside(values_WN, sighting), 0)

    def _outside(self, values_WX: np.ndarray, sighting: Sighting) -> np.ndarray:
        return np.delete(values_WX, np.arange(len(values_WX))[self._windows_of(sighting)], axis=0)

    def _has_past(self, sighting: Sighting) -> bool:
        """Whether there are enough windows without it, before it or after."""
        return len(self.matrices.window_W) - (sighting.last - sighting.first + 1) >= MIN_PAST

    def beside_tier(self, point: Sighting) -> tuple[float, float]:
        """A link's wait over that of its tier; and the same over what it is in the other windows, NaN where those are
        too few."""
        src, dst = point.place.src, point.place.dst
        tier_NN = self._topology.alike_NN
        usual_us_W = median(self.matrices.wait_us_WNN[:, tier_NN == tier_NN[src, dst]], 1)
        ratio_W = self.matrices.wait_us_WNN[:, src, dst] / np.maximum(FLOOR_US, usual_us_W)
        during = median_of_known(ratio_W[self._windows_of(point)])
        outside = median_of_known(self._outside(ratio_W, point)) if self._has_past(point) else math.nan
        return during, during / outside if outside > 0 else math.nan

    def row(self, sighting: Sighting) -> tuple[float, float]:
        """A column's own row: (ratio, z), in the phase where the others wait longest for it. Compared with the others
        and, where the log has windows before or after, with the row in those: healthy ranks differ, too."""
        rank, at = sighting.place.rank, self._windows_of(sighting)
        if rank is None:
            return 1.0, 0.0
        parts = (self.matrices.dispatch_us_WNN, self.matrices.combine_us_WNN)
        waits = [median_of_known(self._waits_WX(part, sighting)) for part in parts]
        effects = self._phases[int(waits[1] > waits[0])]
        row_W, error = effects.row_WN[:, rank], median_of_known(effects.rank_error_W1[at])
        during, num_during = median_of_known(row_W[at]), sighting.last - sighting.first + 1
        outside_W = np.delete(row_W, np.arange(sighting.first, sighting.last + 1))
        outside_W = outside_W[~np.isnan(outside_W)]
        if len(outside_W) < 3:
            return math.exp(during), during / (error / math.sqrt(min(num_during, 4)))
        error *= math.sqrt(1 / min(num_during, 4) + 1 / min(len(outside_W), 4))
        change = during - float(np.median(outside_W))
        return math.exp(change), change / error


def _sum_of_known(values: np.ndarray, axis: int) -> np.ndarray:
    """NaN where nothing is known."""
    return np.where(np.isnan(values).all(axis=axis), np.nan, np.nansum(values, axis=axis))


def _over_median(values_N: np.ndarray, rank: int | None) -> float:
    """A rank's value over the median rank's; 1 when there is nothing to compare with."""
    usual = median_of_known(values_N)
    if rank is None or usual <= 0 or math.isnan(values_N[rank]):
        return 1.0
    return float(values_N[rank]) / usual
