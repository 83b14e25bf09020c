"""SlotMap: one layer's placement as tensors: from the gate's logical experts to expert slots.

The plan itself is eprt.balancer's; this is the only file of the communication layer that imports it.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from eprt.balancer import Placement


@dataclass(frozen=True)
class SlotMap:
    """L = logical experts, S = slots of all ranks, X = largest replica count.

    expert_of_slot_S: int64, -1 for a slot without expert. slot_table_LX: int64, the slots of each expert, -1 past
    replica_count_L. Both have one row more, which index -1 reaches: a masked choice has the "slot" -1.
    """

    expert_of_slot_S: Tensor
    slot_table_LX: Tensor
    replica_count_L: Tensor

    @staticmethod
    def contiguous(num_experts: int, num_ranks: int) -> "SlotMap":
        """One copy of each expert, in order, spread evenly; where the division leaves slots over, they stay empty."""
        return SlotMap.of_layer(Placement.contiguous(1, num_experts, num_ranks), 0)

    @staticmethod
    def of_layer(placement: Placement, layer: int) -> "SlotMap":
        """layer: row of the placement (MoE layers count from 0)."""
        slot_table_LX = torch.tensor(placement.logical_to_physical_map[layer], dtype=torch.int64)
        replica_count_L = torch.tensor(placement.replica_count[layer], dtype=torch.int64)
        return SlotMap(
            torch.tensor(placement.physical_to_logical_map[layer], dtype=torch.int64),
            F.pad(slot_table_LX, (0, 0, 0, 1), value=-1),
            F.pad(replica_count_L, (0, 1), value=1),
        )

    @property
    def num_slots(self) -> int:
        return self.expert_of_slot_S.shape[0]

    def experts_of_rank(self, rank: int, num_ranks: int) -> list[int]:
        """The logical expert in each local slot of a rank, -1 for none."""
        per_rank = self.num_slots // num_ranks
        return self.expert_of_slot_S[rank * per_rank : (rank + 1) * per_rank].tolist()

    def slot_idx(self, expert_idx_TK: Tensor) -> Tensor:
        """int64 slots for logical experts; -1 stays -1. The tokens take an expert's replicas in turn."""
        if self.slot_table_LX.shape[1] == 1:
            return self.slot_table_LX[:, 0][expert_idx_TK]
        turn_T1 = torch.arange(expert_idx_TK.shape[0]).unsqueeze(1)
        return self.slot_table_LX[expert_idx_TK, turn_T1 % self.replica_count_L[expert_idx_TK]]
