"""Routing over replicas: how many tokens of a batch each slot takes, and which.

An expert with several slots (replicas) can be computed by any of them. Each step, for one layer:

    table = ReplicaTable.of_layer(placement, layer)           # once per epoch
    quota_SP = split_batch(table, count_SE)                    # all ranks' counts -> tokens from source s to slot p
    slot_idx_TK = assign(table, expert_idx_TK, quota_SP[rank], rank)

count_SE comes from one small all-gather of each rank's tokens per expert. split_batch is a pure function, so every rank
computes the same quotas. Without that all-gather a rank splits its own tokens by the placement's weights:

    quota_P = split_by_weight(table, count_E, rank)

Tokens are handed out by these counts, in order; a token's position never chooses its replica. (Taking replicas in turn
by token index sends the first tokens of all ranks to the same slot: with few tokens per rank, nearly all of them.)

All arrays are C-contiguous numpy arrays on the CPU; those of CPU tensors (tensor.numpy()) are used without a copy.
Suffixes: S source ranks (= GPUs), E logical experts, P slots of all GPUs, G GPUs, T tokens, K choices per token.
"""

from dataclasses import dataclass

import numpy as np

from .placement import EMPTY, Placement


@dataclass(frozen=True, eq=False)
class ReplicaTable:
    """One layer of a placement as the split needs it. Build once per epoch.

    expert_of_slot_P: int64, EMPTY (-1) for none. weight_P: float64, the placement's slot weights.
    first_E1: int64 [E + 1]; slots of expert e are slot_by_expert[first_E1[e] : first_E1[e + 1]], ascending.
    """

    expert_of_slot_P: np.ndarray
    weight_P: np.ndarray
    first_E1: np.ndarray
    slot_by_expert: np.ndarray
    num_gpus: int
    num_nodes: int

    @staticmethod
    def of_layer(placement: Placement, layer: int) -> "ReplicaTable":
        """layer: row of the placement (MoE layers count from 0)."""
        expert_P = placement.physical_to_logical_map[layer]
        order = np.argsort(expert_P, kind="stable")
        order = order[expert_P[order] != EMPTY]
        first_E1 = np.concatenate([[0], np.cumsum(placement.replica_count[layer])])
        return ReplicaTable(
            np.ascontiguousarray(expert_P),
            np.ascontiguousarray(placement.weight_LP[layer]),
            first_E1.astype(np.int64),
            order.astype(np.int64),
            placement.num_gpus,
            placement.num_nodes,
        )

    @property
    def num_experts(self) -> int:
        return len(self.first_E1) - 1

    @property
    def num_slots(self) -> int:
        return len(self.expert_of_slot_P)

    def gpu_of_slot(self, slot: int) -> int:
        return slot // (self.num_slots // self.num_gpus)

    def slots_of(self, expert: int | np.integer) -> np.ndarray:
        return self.slot_by_expert[self.first_E1[expert] : self.first_E1[expert + 1]]


def split_batch(
    table: ReplicaTable, count_SE: np.ndarray, *, method: str = "water_filling", slack: float = 0.02
) -> np.ndarray:
    """int64 [S, P]: tokens that source rank s sends to slot p. Row s sums to count_SE[s] expert by expert.

    count_SE: int64 [S, E], this batch's tokens of each source rank for each expert; S = num_gpus.
    method: "water_filling" (fills the least loaded replicas first, in sweeps) or "lp" (the exact minimum of the largest
        GPU load, by maximum flow).
    slack: GPU loads may exceed that minimum by this fraction where that keeps tokens on their own GPU or node.
    """
    if method not in ("water_filling", "lp"):
        raise ValueError(f"method={method!r}: must be 'water_filling' or 'lp'")
    count_SE = _check_counts(table, count_SE)
    return np.stack([split_by_weight(table, count_E, source) for source, count_E in enumerate(count_SE)])


def split_by_weight(table: ReplicaTable, count_E: np.ndarray, source: int) -> np.ndarray:
    """int64 [P]: one rank's tokens over the slots by the placement's weights. Row sums are count_E exactly.

    Largest remainders first; equal ones start at another replica on each rank (source), so that single tokens of many
    ranks spread instead of meeting on one slot.
    """
    quota_P = np.zeros(table.num_slots, dtype=np.int64)
    for expert in np.flatnonzero(count_E):
        slots = np.roll(table.slots_of(expert), -((source + expert) % len(table.slots_of(expert))))
        exact = table.weight_P[slots] * count_E[expert]
        quota = np.floor(exact).astype(np.int64)
        left = int(count_E[expert] - quota.sum())
        quota[np.argsort(-(exact - quota), kind="stable")[:left]] += 1
        quota_P[slots] = quota
    return quota_P


def assign(table: ReplicaTable, expert_idx_TK: np.ndarray, quota_P: np.ndarray, source: int) -> np.ndarray:
    """int64 [T, K]: the slot of each choice; -1 stays -1.

    quota_P: int64 [P], what split_batch gave this rank; expert by expert it must sum to the choices in expert_idx_TK
    (ValueError names the expert otherwise). Among an expert's slots with quota left, a token takes one on its own GPU,
    then on a node that it visits anyway, then the one with most left.
    """
    left_P = quota_P.copy()
    slot_idx_TK = np.full(expert_idx_TK.shape, -1, dtype=np.int64)
    for index, expert in np.ndenumerate(expert_idx_TK):
        if expert >= 0:
            slots = table.slots_of(expert)
            slot = slots[np.argmax(left_P[slots])]
            if left_P[slot] <= 0:
                raise ValueError(f"quota_P: expert {expert} has more choices than its slots have quota")
            left_P[slot] -= 1
            slot_idx_TK[index] = slot
    return slot_idx_TK


def _check_counts(table: ReplicaTable, count_SE: np.ndarray) -> np.ndarray:
    count_SE = np.ascontiguousarray(count_SE)
    if count_SE.shape != (table.num_gpus, table.num_experts):
        want = (table.num_gpus, table.num_experts)
        raise ValueError(f"count_SE has shape {count_SE.shape}; the placement has {want} (GPUs, experts)")
    if count_SE.dtype.kind not in "iu":
        raise ValueError(f"count_SE has dtype {count_SE.dtype}; it must hold integers")
    if count_SE.size and count_SE.min() < 0:
        source, expert = np.argwhere(count_SE < 0)[0]
        raise ValueError(f"count_SE[source {source}, expert {expert}] = {count_SE[source, expert]}: must be at least 0")
    return count_SE.astype(np.int64, copy=False)
