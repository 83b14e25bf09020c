"""Routing over replicas: how many tokens of a batch each slot takes, and which tokens.

Any slot of an expert with several slots (replicas) can compute a token. In each step, for one layer:

    table = ReplicaTable.of_layer(placement, layer)           # once per epoch
    quota_SP = split_batch(table, count_SE)                    # all ranks' counts -> tokens from source s to slot p
    slot_idx_TK = assign(table, expert_idx_TK, quota_SP[rank], rank)

count_SE comes from one small all-gather of each rank's tokens per expert. split_batch is a pure function, so every rank
computes the same quotas. Without that all-gather a rank splits its own tokens by the placement's weights:

    quota_P = split_by_weight(table, count_E, rank)

Tokens are assigned by these counts, in order; a token's position never determines its replica. (Round-robin by token
index would send the first tokens of all ranks to the same slot: with few tokens per rank, nearly all of them.)

All arrays are C-contiguous numpy arrays on the CPU; those of CPU tensors (tensor.numpy()) are used without a copy.
Suffixes: S source ranks (= GPUs), E logical experts, P slots of all GPUs, G GPUs, T tokens, K choices per token.
Knows nothing of how tokens or counts travel.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from .core import CReplicas, as_struct, call_native
from .placement import EMPTY, Placement


@dataclass(frozen=True, eq=False)
class ReplicaTable:
    """One layer of a placement as the split needs it. Build it once per epoch."""

    expert_of_slot_P: np.ndarray  # int64, EMPTY (-1) for none
    weight_P: np.ndarray  # float64: the placement's slot weights
    # int64 [E + 1]: the slots of expert e are slot_by_expert[first_E1[e] : first_E1[e + 1]], ascending.
    first_E1: np.ndarray
    slot_by_expert: np.ndarray  # int64
    num_gpus: int
    num_nodes: int
    speed_G: np.ndarray  # float64

    @staticmethod
    def of_layer(placement: Placement, layer: int, gpu_speed: np.ndarray | None = None) -> "ReplicaTable":
        """The table of one layer.

        layer: row of the placement (MoE layers count from 0).
        gpu_speed: [G], relative; default all equal. A GPU of speed 0 gets no tokens of an expert with a slot elsewhere.
        """
        expert_P = np.ascontiguousarray(placement.physical_to_logical_map[layer])
        weight_P = np.ascontiguousarray(placement.weight_LP[layer])
        slot_by_expert = np.argsort(expert_P, kind="stable")[np.count_nonzero(expert_P == EMPTY) :]  # -1 comes first
        first_E1 = np.concatenate(([0], np.cumsum(placement.replica_count[layer])))
        speed_G = np.ones(placement.num_gpus) if gpu_speed is None else np.array(gpu_speed, dtype=np.float64)
        if speed_G.shape != (placement.num_gpus,) or not (speed_G >= 0).all() or not speed_G.any():
            raise ValueError(f"gpu_speed={gpu_speed}: must be {placement.num_gpus} numbers of at least 0, not all 0")
        num_gpus, num_nodes = placement.num_gpus, placement.num_nodes
        return ReplicaTable(expert_P, weight_P, first_E1, slot_by_expert, num_gpus, num_nodes, speed_G)

    @property
    def num_experts(self) -> int:
        return len(self.first_E1) - 1

    @property
    def num_slots(self) -> int:
        return len(self.expert_of_slot_P)

    @cached_property
    def as_c(self) -> CReplicas:
        return as_struct(CReplicas, self)


METHODS = {"water_filling": 0, "lp": 1}


def split_batch(
    table: ReplicaTable,
    count_SE: np.ndarray,
    *,
    method: str = "water_filling",
    slack: float = 0.01,
    source: int | None = None,
) -> np.ndarray:
    """int64 [S, P]: tokens that source rank s sends to slot p. Row s sums to count_SE[s] for every expert.

    Every rank computes the same quotas from the same counts.

    count_SE: int64 [S, E], this batch's tokens of each source rank for each expert; S = num_gpus.
    method: how the largest GPU load is minimised: "water_filling" (sweeps that fill the least busy replicas, close to
        the minimum) or "lp" (the minimum in whole tokens, by maximum flow).
    slack: fraction by which GPU loads may exceed that to keep tokens on their own GPU, then on their own node.
    source: return only this rank's row, [P].
    """
    if method not in METHODS:
        raise ValueError(f"method={method!r}: must be one of {', '.join(METHODS)}")
    if not 0 <= slack < np.inf:
        raise ValueError(f"slack={slack}: must be finite and at least 0")
    count_SE = _counts(count_SE, (table.num_gpus, table.num_experts), "count_SE")
    if source is None:
        quota = np.empty((table.num_gpus, table.num_slots), dtype=np.int64)
    else:
        _check_source(table, source)
        quota = np.empty(table.num_slots, dtype=np.int64)
    row = -1 if source is None else int(source)
    call_native("eprt_split_batch", table.as_c, count_SE, METHODS[method], float(slack), row, quota)
    return quota


def split_by_weight(table: ReplicaTable, count_E: np.ndarray, source: int) -> np.ndarray:
    """int64 [P]: one rank's tokens split over the slots by the placement's weights; sums to count_E exactly.

    Leftover tokens go to the largest remainders. Ties start at a different replica on each rank (source), so that
    single tokens of many ranks do not all go to the same slot.

    count_E: int64 [E].
    """
    _check_source(table, source)
    count_E = _counts(count_E, (table.num_experts,), "count_E")
    quota_P = np.empty(table.num_slots, dtype=np.int64)
    call_native("eprt_split_by_weight", table.as_c, count_E, int(source), quota_P)
    return quota_P


def assign(table: ReplicaTable, expert_idx_TK: np.ndarray, quota_P: np.ndarray, source: int) -> np.ndarray:
    """int64 [T, K]: the slot of each choice; -1 stays -1.

    Among an expert's slots with quota left, a token takes one on its own GPU, else one on a node that it visits anyway,
    else the one with most quota left. ValueError names an expert whose quota is too small.

    quota_P: int64 [P], the result of split_batch or split_by_weight for this rank and the choices in expert_idx_TK.
    """
    _check_source(table, source)
    quota_P = _counts(quota_P, (table.num_slots,), "quota_P")
    expert_idx_TK = np.ascontiguousarray(expert_idx_TK, dtype=np.int64)
    if expert_idx_TK.ndim != 2:
        raise ValueError(f"expert_idx_TK has shape {expert_idx_TK.shape}; it must be [tokens, choices]")
    slot_idx_TK = np.empty_like(expert_idx_TK)
    call_native("eprt_assign", table.as_c, *expert_idx_TK.shape, expert_idx_TK, quota_P, int(source), slot_idx_TK)
    return slot_idx_TK


def _check_source(table: ReplicaTable, source: int) -> None:
    if not 0 <= source < table.num_gpus:
        raise ValueError(f"source={source}: there are ranks 0 to {table.num_gpus - 1}")


def _counts(count: np.ndarray, shape: tuple[int, ...], name: str) -> np.ndarray:
    count = np.ascontiguousarray(count)
    if count.shape != shape:
        raise ValueError(f"{name} has shape {count.shape}; the placement needs {shape}")
    if count.dtype.kind not in "iu":
        raise ValueError(f"{name} has dtype {count.dtype}; it must hold integers")
    if count.size and count.min() < 0:
        index = tuple(int(i) for i in np.argwhere(count < 0)[0])
        raise ValueError(f"{name}{list(index)} = {count[index]}: must be at least 0")
    return count.astype(np.int64, copy=False)
