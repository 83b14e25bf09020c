"""SlotMap: one layer's placement as tensors: from the gate's logical experts to expert slots.

The plan itself is eprt.balancer's. Letters: L logical experts, S slots of all ranks, X largest number of replicas,
N ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from eprt.balancer import Placement

# Golden ratio: its multiples, modulo 1, fill any interval evenly however many of them are taken.
_PHI = 0.6180339887498949


@dataclass(frozen=True)
class SlotMap:
    """Immutable; a new placement is a new SlotMap.

    expert_of_slot_S: int64, -1 for a slot without expert. slot_table_LX: int64, the slots of each expert, -1 past
    replica_count_L. Both have one row more, which index -1 reaches: a masked choice has the "slot" -1.
    share_LX: float64, cumulated over X: the part of this rank's tokens for an expert that each replica gets; 1 from the
    last replica on.
    """

    expert_of_slot_S: Tensor
    slot_table_LX: Tensor
    replica_count_L: Tensor
    share_LX: np.ndarray

    @staticmethod
    def contiguous(num_experts: int, num_ranks: int, num_redundant: int = 0) -> "SlotMap":
        """One copy of each expert, in order, spread evenly; slots left over stay empty: at least num_redundant."""
        num_slots = -(-(num_experts + num_redundant) // num_ranks) * num_ranks
        return SlotMap.of_layer(Placement.contiguous(1, num_experts, num_ranks, num_slots), 0)

    @staticmethod
    def of_layer(placement: Placement, layer: int) -> "SlotMap":
        """layer: row of the placement (MoE layers count from 0). Replicas share tokens evenly."""
        return SlotMap.of_row(placement.physical_to_logical_map[layer], placement.num_experts)

    @staticmethod
    def of_row(
        expert_of_slot_S: np.ndarray,
        num_experts: int,
        *,
        weight_S: np.ndarray | None = None,
        rank: int = 0,
        node_of_rank: Sequence[int] | None = None,
    ) -> "SlotMap":
        """weight_S: part of its expert's tokens, all ranks' together, that each slot is meant to get; default even.

        node_of_rank: rank prefers replicas of its own, then of its node, as far as the weights allow; without it every
        rank splits by the weights alone.
        """
        row_S = np.asarray(expert_of_slot_S, dtype=np.int64)
        count_L = np.bincount(row_S[row_S >= 0], minlength=num_experts)
        slots_LX = np.full((num_experts + 1, max(1, int(count_L.max()))), -1, dtype=np.int64)
        used = np.nonzero(row_S >= 0)[0]
        by_expert = used[np.argsort(row_S[used], kind="stable")]
        first_L = np.cumsum(count_L) - count_L
        slots_LX[row_S[by_expert], np.arange(len(by_expert)) - first_L[row_S[by_expert]]] = by_expert
        weight_LX = _weights(slots_LX, weight_S)
        if node_of_rank is not None:
            rank_LX = np.where(slots_LX >= 0, slots_LX // (len(row_S) // len(node_of_rank)), -1)
            weight_LX = _local_first(weight_LX, rank_LX, rank, np.asarray(node_of_rank))
        share_LX = np.cumsum(weight_LX, axis=1)
        share_LX[np.arange(share_LX.shape[1]) >= np.append(count_L, 1)[:, None] - 1] = 1.0
        return SlotMap(
            torch.from_numpy(row_S.copy()),
            torch.from_numpy(slots_LX),
            torch.from_numpy(np.append(count_L, 1)),
            share_LX,
        )

    def to(self, device: torch.device | str) -> "SlotMap":
        """For choices that lie on this device."""
        return replace(self, slot_table_LX=self.slot_table_LX.to(device))

    @property
    def num_slots(self) -> int:
        return self.expert_of_slot_S.shape[0]

    @property
    def num_experts(self) -> int:
        return self.slot_table_LX.shape[0] - 1

    def experts_of_rank(self, rank: int, num_ranks: int) -> list[int]:
        """The logical expert in each local slot of a rank, -1 for none."""
        per_rank = self.num_slots // num_ranks
        return self.expert_of_slot_S[rank * per_rank : (rank + 1) * per_rank].tolist()

    def slot_idx(self, expert_idx_TK: Tensor, sent_L: np.ndarray | None = None) -> Tensor:
        """int64 slots for logical experts; -1 stays -1.

        An expert's tokens go to its replicas by their number, not by their place in the batch, in the proportion of
        share_LX. sent_L: int64 [L + 1], tokens sent to each expert before, by which the count goes on; updated.
        With replicas the choices come to the CPU on their way.
        """
        if self.slot_table_LX.shape[1] == 1:
            return self.slot_table_LX[:, 0][expert_idx_TK]
        expert_A = expert_idx_TK.reshape(-1).cpu().numpy()
        replica_A = self._replicas(expert_A, np.zeros(self.num_experts + 1, np.int64) if sent_L is None else sent_L)
        slot_A = self.slot_table_LX.cpu().numpy()[expert_A, replica_A]
        return torch.from_numpy(slot_A).view(expert_idx_TK.shape).to(expert_idx_TK.device)

    def _replicas(self, expert_A: np.ndarray, sent_L: np.ndarray) -> np.ndarray:
        """int64: which of its replicas each of A choices takes."""
        order = np.argsort(expert_A, kind="stable")
        sorted_A = expert_A[order]
        starts = np.nonzero(np.diff(sorted_A, prepend=-2))[0]
        counts = np.diff(starts, append=len(sorted_A))
        number_A = np.arange(len(sorted_A)) - np.repeat(starts, counts) + sent_L[sorted_A]
        sent_L[sorted_A[starts]] += counts
        replica_A = np.empty(len(expert_A), dtype=np.int64)
        replica_A[order] = ((number_A * _PHI % 1.0)[:, None] >= self.share_LX[sorted_A]).sum(1)
        return replica_A


def _weights(slots_LX: np.ndarray, weight_S: np.ndarray | None) -> np.ndarray:
    """float64 [L + 1, X], rows summing to 1 (the last to 0); even where all of an expert's weights are 0."""
    exists_LX = slots_LX >= 0
    even_LX = exists_LX / np.maximum(exists_LX.sum(1, keepdims=True), 1)
    if weight_S is None:
        return even_LX
    weight_LX = np.where(exists_LX, np.asarray(weight_S, dtype=np.float64)[slots_LX], 0.0)
    total_L1 = weight_LX.sum(1, keepdims=True)
    return np.where(total_L1 > 0, weight_LX / np.where(total_L1 > 0, total_L1, 1), even_LX)


def _local_first(weight_LX: np.ndarray, rank_LX: np.ndarray, rank: int, node_N: np.ndarray) -> np.ndarray:
    """This rank's shares when every rank has equally many tokens and all of them together are to meet weight_LX.

    A rank's tokens go to its own replica up to that one's weight, what is left to replicas of its node up to theirs,
    the rest to what is free anywhere.
    """
    num_ranks, num_nodes = len(node_N), int(node_N.max()) + 1
    rows = np.arange(len(weight_LX))[:, None]
    demand_LN = np.zeros((len(weight_LX), num_ranks + 1))  # one column more, which rank -1 reaches
    np.add.at(demand_LN, (rows, rank_LX), weight_LX)
    total_LN = demand_LN[:, :num_ranks].copy()
    own_LN = np.minimum(1 / num_ranks, total_LN)
    supply_LN, free_LN = 1 / num_ranks - own_LN, total_LN - own_LN
    nodes_ND = np.eye(num_nodes)[node_N]
    supply_LD, free_LD = supply_LN @ nodes_ND, free_LN @ nodes_ND
    inside_LD = np.minimum(supply_LD, free_LD)
    node = node_N[rank]
    # What this rank sends to each rank: its own, then its part of what stays in the node, then of what leaves.
    sent_LN = np.zeros_like(total_LN)
    sent_LN[:, rank] = own_LN[:, rank]
    part_L = _ratio(supply_LN[:, rank], supply_LD[:, node])
    to_node_LN = free_LN * (node_N == node) * _ratio(inside_LD, free_LD)[:, node, None]
    sent_LN += part_L[:, None] * to_node_LN
    left_LN = free_LN * (1 - _ratio(inside_LD, free_LD)[:, node_N])
    out_L = supply_LN[:, rank] * (1 - _ratio(inside_LD, supply_LD)[:, node])
    sent_LN += out_L[:, None] * _ratio(left_LN, left_LN.sum(1, keepdims=True))
    share_LN = np.concatenate((_ratio(sent_LN, total_LN), np.zeros((len(weight_LX), 1))), axis=1)
    sent_LX = share_LN[rows, rank_LX] * weight_LX
    return _ratio(sent_LX, sent_LX.sum(1, keepdims=True))


def _ratio(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """a / b, 0 where b is 0 (or no more than rounding left over)."""
    a, b = np.broadcast_arrays(a, b)
    return np.divide(a, b, out=np.zeros(a.shape), where=b > 1e-12)
