"""LostRanks: a layer's calls go on without ranks that die in them: tokens go to replicas of their experts.

All ranks find by themselves that a call has failed, and for which rank, from flags that they share.
Knows nothing of what a call computes.
"""

from collections.abc import Callable

import numpy as np
from torch import Tensor

from eprt.ep.errors import EPError, RankLostError
from eprt.ep.exchange import Exchange
from eprt.ep.group.group import EPGroup
from eprt.ep.group.view import View
from eprt.ep.migration.round import MovableLayer
from eprt.ep.placement.slot_map import SlotMap


class LostRanks:
    """Of one layer. All layers of a group keep its view.

    layer_idx: of the layer, for messages.

    ValueError for an exchange that cannot go on without a rank.
    """

    def __init__(self, layer: MovableLayer, exchange: Exchange, group: EPGroup, layer_idx: int):
        self._layer, self._exchange, self._group = layer, exchange, group
        self._where = f"[rank {group.rank}/{group.size}] EPMoE layer {layer_idx}:"
        self._view = group.view
        exchange.require_restartable()
        group.fails_in_order = True

    def run(self, call: Callable[[], Tensor]) -> Tensor:
        """The call's result, from the first try in which no rank is lost. EPError naming experts that are gone."""
        while True:
            if self._view != self._group.view:
                self._follow_view()
            try:
                return call()
            except RankLostError as error:
                self._group.view = self._group.view.without(error.lost)

    def _follow_view(self) -> None:
        view = self._group.view
        self._layer.place(slot_map_of_view(self._layer.slot_map, view, self._where), self._layer.weight_buffers())
        self._exchange.follow_view(view)
        self._view = view


def slot_map_of_view(slot_map: SlotMap, view: View, where: str) -> SlotMap:
    """Without the slots of ranks that take no part. EPError naming the experts that have no other slot."""
    row_S = slot_map.expert_of_slot_S.numpy().copy()
    row_S[~np.repeat(view.alive, len(row_S) // len(view.alive))] = -1
    missing = sorted(set(range(slot_map.num_experts)) - set(row_S.tolist()))
    if missing:
        gone = [rank for rank, alive in enumerate(view.alive) if not alive]
        raise EPError(
            f"{where} expert{'s' * (len(missing) > 1)} {', '.join(map(str, missing))} had no replica outside of rank "
            f"{', '.join(map(str, gone))}, which was lost; give every expert slots on two ranks (slot_map), or restart "
            "the job"
        )
    return SlotMap.from_row(row_S, slot_map.num_experts)
