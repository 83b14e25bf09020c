"""BatchRouter: a step's tokens over the replicas of their experts, by what all ranks route in this very step.

A placement's weights are right on the average; a batch is never the average. Here every rank shows, layer by layer, how
many tokens it has for each expert, and every rank computes the same split: the busiest rank's load as low as it can be,
then as many tokens as possible on their own rank and their own node (eprt/balancer/split.py). The split goes by counts,
never by a token's position. It costs one exchange between ranks per layer: worth it where batches are large and uneven.
"""

import numpy as np
import torch
from torch import Tensor

from eprt.balancer import Placement, ReplicaTable, assign, split_batch
from eprt.balancer.placement import even_nodes
from eprt.ep.group.group import EPGroup
from eprt.ep.group.int_all_gather import IntAllGather
from eprt.ep.placement.slot_map import SlotMap

# EngineConfig.replica_routing -> method of split_batch.
METHODS = {"batch": "water_filling", "batch-lp": "lp"}


class BatchRouter:
    """Shared by a model's layers. Construction and slot_idx are collective: all ranks, the same layers in order."""

    def __init__(self, group: EPGroup, num_experts: int, method: str = "water_filling", timeout_s: float | None = None):
        self._group, self._num_experts, self._method = group, num_experts, method
        self._num_nodes = even_nodes(group.node_of_rank)
        self._counts = IntAllGather(group, num_experts, timeout_s)
        # What each rank can carry; the split gives it tokens in proportion. Empty: all alike.
        self.rank_speeds: tuple[float, ...] = ()
        self._tables: dict[int, tuple[SlotMap, ReplicaTable]] = {}

    def set_rank_speeds(self, speed_N: tuple[float, ...]) -> None:
        """The same on all ranks, and between the same two steps: their splits must agree."""
        if speed_N != self.rank_speeds:
            self.rank_speeds = speed_N
            self._tables.clear()

    def slot_idx(self, layer: int, slot_map: SlotMap, expert_idx_TK: Tensor) -> Tensor:
        """int64 slots for logical experts; -1 stays -1. layer: any number that is this layer's only.

        The exchange and the split are the host's: choices on a GPU are waited for, so such a step is not recorded.
        """
        expert_TK = expert_idx_TK.cpu().numpy()
        if not slot_map.has_replicas or slot_map.lacks_experts:  # on all ranks alike
            return slot_map.slot_idx(torch.from_numpy(expert_TK)).to(expert_idx_TK.device)
        count_E = np.bincount(expert_TK.reshape(-1) + 1, minlength=self._num_experts + 1)[1:]  # without the masked
        count_SE = self._counts.all_gather(count_E)  # type: ignore[arg-type]
        table = self._table(layer, slot_map)
        quota_P = split_batch(table, count_SE, method=self._method, source=self._group.rank)
        slot_TK = assign(table, expert_TK, quota_P, self._group.rank)
        return torch.from_numpy(slot_TK).to(expert_idx_TK.device)

    def _table(self, layer: int, slot_map: SlotMap) -> ReplicaTable:
        known, table = self._tables.get(layer, (None, None))
        if known is not slot_map or table is None:
            row_P = slot_map.expert_of_slot_S.numpy()
            placement = Placement(row_P[None], self._group.size, self._num_nodes)
            table = ReplicaTable.of_layer(placement, 0, np.array(self.rank_speeds) if self.rank_speeds else None)
            self._tables[layer] = (slot_map, table)
        return table

    @property
    def epoch(self) -> int:
        """Of the latest exchange of counts, also where it failed."""
        return self._counts.epoch

    def restart(self, epoch: int) -> None:
        """As IntAllGather.restart."""
        self._counts.restart(epoch)

    def close(self) -> None:
        """Collective while all ranks live; never hangs when some do not."""
        self._counts.close()
