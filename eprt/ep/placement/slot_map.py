"""SlotMap: one layer's placement as tensors: from the gate's logical experts to expert slots. SlotTable: the same where
the tokens are.

The plan itself is eprt.balancer's. Letters: L logical experts, S slots of all ranks, X largest number of replicas,
N ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from eprt import ops
from eprt.balancer import Placement
from eprt.gpu.readback import overwrite
from eprt.ops.replicas import ONE


@dataclass(frozen=True)
class SlotMap:
    """Immutable; a new placement is a new SlotMap.

    slot_LX and bound_LX have one row more, which index -1 reaches: a masked choice has the "slot" -1.
    """

    expert_of_slot_S: Tensor  # int64; -1 for a slot without expert
    slot_LX: Tensor  # int64: the slots of each expert, -1 past its last
    # int64, cumulated over X: the part of this rank's tokens for an expert that each replica gets, in 1 / 2^32; 2^32
    # from the last replica on.
    bound_LX: Tensor

    @staticmethod
    def contiguous(num_experts: int, num_ranks: int, num_redundant: int = 0) -> "SlotMap":
        """One copy of each expert, in order, spread evenly; slots left over stay empty: at least num_redundant."""
        num_slots = -(-(num_experts + num_redundant) // num_ranks) * num_ranks
        return SlotMap.from_placement(Placement.contiguous(1, num_experts, num_ranks, num_slots), 0)

    @staticmethod
    def from_placement(placement: Placement, layer: int) -> "SlotMap":
        """layer: row of the placement (MoE layers count from 0). Replicas share tokens evenly."""
        return SlotMap.from_row(placement.physical_to_logical_map[layer], placement.num_experts)

    @staticmethod
    def from_row(
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
        bound_LX = np.rint(np.cumsum(weight_LX, axis=1) * ONE).astype(np.int64)
        bound_LX[np.arange(bound_LX.shape[1]) >= np.append(count_L, 1)[:, None] - 1] = ONE
        return SlotMap(torch.from_numpy(row_S.copy()), torch.from_numpy(slots_LX), torch.from_numpy(bound_LX))

    @property
    def num_slots(self) -> int:
        return self.expert_of_slot_S.shape[0]

    @property
    def num_experts(self) -> int:
        return self.slot_LX.shape[0] - 1

    @property
    def lacks_experts(self) -> bool:
        """Whether some expert has no slot: choices of it get the slot -1."""
        return bool((self.slot_LX[:-1, 0] < 0).any())

    @property
    def has_replicas(self) -> bool:
        return self.slot_LX.shape[1] > 1

    def experts_of_rank(self, rank: int, num_ranks: int) -> list[int]:
        """The logical expert in each local slot of a rank, -1 for none."""
        per_rank = self.num_slots // num_ranks
        return self.expert_of_slot_S[rank * per_rank : (rank + 1) * per_rank].tolist()

    def slot_idx(self, expert_idx_TK: Tensor, sent_L: np.ndarray | None = None) -> Tensor:
        """int64 slots for logical experts, on the CPU; -1 stays -1.

        An expert's tokens go to its replicas by their number, not by their place in the batch, in the proportion of
        bound_LX. sent_L: int64 [L + 1], tokens sent to each expert before, by which the count goes on; updated.
        """
        sent_L = np.zeros(self.num_experts + 1, np.int64) if sent_L is None else sent_L
        return ops.choose_slots(expert_idx_TK, self.slot_LX, self.bound_LX, torch.from_numpy(sent_L))


class SlotTable:
    """A layer's slot map on the device where its tokens are, and the count by which they go to replicas.

    only_slot_L: int64 [L + 1], the slot of each expert, the last is -1; None where a placement gives one several.
    in_place (default: on GPUs): its tensors keep their addresses under every placement of these slots, so that a
    recorded CUDA graph follows the next one; they change in the order of the current stream.
    """

    def __init__(self, slot_map: SlotMap, device: torch.device | str, in_place: bool | None = None):
        self._in_place = torch.device(device).type != "cpu" if in_place is None else in_place
        self._width = slot_map.num_slots - slot_map.num_experts + 1  # no expert can have more replicas
        self._slot_LX, self._bound_LX = (table.to(device) for table in self._tables(slot_map))
        self.only_slot_L = self._only_slots()
        self._sent_L = torch.zeros(slot_map.num_experts + 1, dtype=torch.int64, device=device)

    def set(self, slot_map: SlotMap) -> None:
        """From now on tokens go where slot_map says. The count goes on."""
        slot_LX, bound_LX = self._tables(slot_map)
        if self._in_place:
            overwrite(self._slot_LX, slot_LX)
            overwrite(self._bound_LX, bound_LX)
        else:
            self._slot_LX, self._bound_LX = slot_LX, bound_LX
            self.only_slot_L = self._only_slots()

    def _only_slots(self) -> Tensor | None:
        return self._slot_LX.view(-1) if self._slot_LX.shape[1] == 1 else None

    def slot_idx(self, expert_idx_TK: Tensor) -> Tensor:
        """int64 slots for logical experts; -1 stays -1. As SlotMap.slot_idx; never waits for a GPU."""
        return ops.choose_slots(expert_idx_TK, self._slot_LX, self._bound_LX, self._sent_L)

    def _tables(self, slot_map: SlotMap) -> tuple[Tensor, Tensor]:
        if not self._in_place:
            return slot_map.slot_LX, slot_map.bound_LX
        missing = (0, self._width - slot_map.slot_LX.shape[1])
        return pad(slot_map.slot_LX, missing, value=-1), pad(slot_map.bound_LX, missing, value=ONE)


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
