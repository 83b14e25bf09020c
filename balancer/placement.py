"""Placement: which slot holds a copy of which expert in every MoE layer.

Knows the invariants of a placement and its file format, not how it is chosen (plan.py) or how weights move.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from .checks import check_values, is_int

EMPTY = -1  # what an unused slot holds


@dataclass(frozen=True, eq=False)
class Placement:
    """The slots of each expert in every layer. The constructor checks it, so every instance is valid.

    Every expert 0..E-1 has at least one slot in every layer, so E is the largest entry of the map plus one.
    """

    # int64 [L, P], read-only: the expert in each slot, EMPTY (-1) for an unused slot. Slot s is on GPU
    # s // (P / num_gpus), GPU g on node g // (num_gpus / num_nodes).
    physical_to_logical_map: np.ndarray
    num_gpus: int
    num_nodes: int = 1
    epoch: int = 0  # counts the placements of one running server; larger is newer
    metrics: dict[str, Any] = field(default_factory=dict)  # the planner's results, plain JSON values
    # float64 [L, P], read-only: the share of its expert's load that each slot should take. The slots of an expert sum
    # to 1, an EMPTY slot has 0. None: the load of every expert is split evenly over its slots.
    slot_weight: np.ndarray | None = None

    def __post_init__(self):
        slots_LP = _as_slot_map(self.physical_to_logical_map)
        check_topology(slots_LP.shape[1], self.num_gpus, self.num_nodes)
        object.__setattr__(self, "physical_to_logical_map", slots_LP)
        if not isinstance(self.epoch, int) or isinstance(self.epoch, bool) or self.epoch < 0:
            raise ValueError(f"epoch={self.epoch!r}: must be an integer of at least 0")
        if self.num_experts > self.num_slots:  # before arrays of that many are made
            have = f"expert {self.num_experts - 1}, but {self.num_slots} slots"
            raise ValueError(f"physical_to_logical_map has {have} cannot hold one of each expert up to it")
        if not isinstance(self.metrics, dict):
            raise ValueError(f"metrics={self.metrics!r}: must be an object")
        missing = np.argwhere(self.replica_count == 0)
        if len(missing):
            layer, expert = missing[0]
            has = f"expert {expert} of {self.num_experts} has no slot ({len(missing)} such experts in all layers)"
            raise ValueError(f"physical_to_logical_map[layer {layer}]: {has}; every expert needs at least one")
        if self.slot_weight is not None:
            object.__setattr__(self, "slot_weight", _checked_weight(self))

    @staticmethod
    def contiguous(
        num_layers: int, num_experts: int, num_gpus: int, num_slots: int | None = None, num_nodes: int = 1
    ) -> "Placement":
        """One copy of each expert, in order, spread over the GPUs as evenly as possible; other slots stay EMPTY.

        The first num_experts % num_gpus GPUs hold one expert more than the others.
        num_slots: default the fewest that hold all experts with equally many slots per GPU.
        """
        for name, value in (("num_layers", num_layers), ("num_experts", num_experts)):
            if value < 1:
                raise ValueError(f"{name}={value}: must be at least 1")
        num_slots = fewest_slots(num_experts, num_gpus) if num_slots is None else num_slots
        check_slots(num_slots, num_experts, num_gpus, num_nodes)
        row_P = contiguous_row(num_experts, num_gpus, num_slots, range(num_gpus))
        return Placement(np.tile(row_P, (num_layers, 1)), num_gpus, num_nodes, metrics={"policy": "contiguous"})

    @property
    def num_layers(self) -> int:
        return self.physical_to_logical_map.shape[0]

    @property
    def num_slots(self) -> int:
        return self.physical_to_logical_map.shape[1]

    @property
    def num_slots_per_gpu(self) -> int:
        return self.num_slots // self.num_gpus

    @cached_property
    def num_experts(self) -> int:
        return int(self.physical_to_logical_map.max()) + 1

    @cached_property
    def replica_count(self) -> np.ndarray:
        """int64 [L, E]: how many slots hold each expert."""
        count_LE = np.zeros((self.num_layers, self.num_experts), dtype=np.int64)
        used_LP = self.physical_to_logical_map != EMPTY
        np.add.at(count_LE, (np.nonzero(used_LP)[0], self.physical_to_logical_map[used_LP]), 1)
        return _frozen(count_LE)

    @cached_property
    def logical_to_physical_map(self) -> np.ndarray:
        """int64 [L, E, X]: the slots of each expert in ascending order, padded with -1; X = largest replica count."""
        count_LE = self.replica_count
        slots_LEX = np.full((*count_LE.shape, int(count_LE.max())), -1, dtype=np.int64)
        for layer, slots_P in enumerate(self.physical_to_logical_map):
            by_expert_P = np.argsort(slots_P, kind="stable")[np.count_nonzero(slots_P == EMPTY) :]  # -1 comes first
            expert_P = slots_P[by_expert_P]
            first_E = np.cumsum(count_LE[layer]) - count_LE[layer]
            slots_LEX[layer, expert_P, np.arange(len(expert_P)) - first_E[expert_P]] = by_expert_P
        return _frozen(slots_LEX)

    def gpu_load(self, load_LE: np.ndarray, weight_LP: np.ndarray | None = None) -> np.ndarray:
        """float64 [L, G]: load of each GPU when every expert's load is split over its slots by weight_LP, default the
        placement's own slot weights."""
        load_LE = np.asarray(load_LE, dtype=np.float64)
        if load_LE.shape != self.replica_count.shape:
            raise ValueError(f"load_LE has shape {load_LE.shape}; this placement has {self.replica_count.shape}")
        load_LP = np.take_along_axis(load_LE, np.maximum(self.physical_to_logical_map, 0), axis=1)
        load_LP = load_LP * (self.weight_LP if weight_LP is None else weight_LP)
        return load_LP.reshape(self.num_layers, self.num_gpus, -1).sum(-1)

    @cached_property
    def weight_LP(self) -> np.ndarray:
        """float64 [L, P]: slot_weight, or the even split if there is none."""
        return self.even_weight_LP if self.slot_weight is None else self.slot_weight

    @cached_property
    def even_weight_LP(self) -> np.ndarray:
        """float64 [L, P]: 1 / (slots of the expert), 0 for EMPTY slots."""
        slots_LP = self.physical_to_logical_map
        count_LP = np.take_along_axis(self.replica_count, np.maximum(slots_LP, 0), axis=1)
        return _frozen((slots_LP != EMPTY) / count_LP)

    def to_json(self) -> dict[str, Any]:
        data = {
            "physical_to_logical_map": self.physical_to_logical_map.tolist(),
            "num_nodes": self.num_nodes,
            "num_gpus": self.num_gpus,
            "epoch": self.epoch,
            "metrics": self.metrics,
        }
        return data if self.slot_weight is None else {**data, "slot_weight": self.slot_weight.tolist()}

    @staticmethod
    def from_json(data: dict[str, Any]) -> "Placement":
        if not isinstance(data, dict):
            raise ValueError(f"a {type(data).__name__} at the top level; expected a placement, which is an object")
        for name in ("physical_to_logical_map", "num_gpus"):
            if name not in data:
                raise ValueError(f"placement has no {name!r}; it has {', '.join(map(repr, data)) or 'nothing'}")
        return Placement(
            np.asarray(_rectangular(data["physical_to_logical_map"])),
            num_gpus=data["num_gpus"],
            num_nodes=data.get("num_nodes", 1),
            epoch=data.get("epoch", 0),
            metrics=data.get("metrics", {}),
            slot_weight=data.get("slot_weight"),
        )

    def save(self, path: str | Path) -> None:
        Path(path).write_text(json.dumps(self.to_json()) + "\n")

    @staticmethod
    def load(path: str | Path) -> "Placement":
        """Reads a file that save() wrote. ValueError names the file if it does not hold a valid placement."""
        try:
            return Placement.from_json(json.loads(Path(path).read_text()))
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None


def even_nodes(node_of_gpu: Sequence[int]) -> int:
    """num_nodes of a placement for these GPUs: 1 unless all nodes have equally many GPUs, in node order, because a
    placement can describe only such nodes."""
    nodes = list(node_of_gpu)
    is_even = len(set(map(nodes.count, nodes))) == 1 and nodes == sorted(nodes)
    return max(nodes) + 1 if is_even else 1


def fewest_slots(num_experts: int, num_gpus: int) -> int:
    """The fewest slots that hold all experts with equally many per GPU."""
    if num_gpus < 1:
        raise ValueError(f"num_gpus={num_gpus}: must be at least 1")
    return -(-num_experts // num_gpus) * num_gpus


def contiguous_row(num_experts: int, num_gpus: int, num_slots: int, live_gpus: Sequence[int]) -> np.ndarray:
    """int64 [P]: experts in order, spread evenly over the live GPUs, EMPTY in all other slots."""
    slots_GS = np.full((num_gpus, num_slots // num_gpus), EMPTY, dtype=np.int64)
    for gpu, experts in zip(live_gpus, np.array_split(np.arange(num_experts), len(live_gpus))):
        if len(experts) > slots_GS.shape[1]:
            raise ValueError(f"num_slots={num_slots}: {len(live_gpus)} GPUs cannot hold {num_experts} experts")
        slots_GS[gpu, : len(experts)] = experts
    return slots_GS.reshape(-1)


def check_topology(num_slots: int, num_gpus: int, num_nodes: int) -> None:
    for name, value in (("num_slots", num_slots), ("num_gpus", num_gpus), ("num_nodes", num_nodes)):
        if not is_int(value, 1):
            raise ValueError(f"{name}={value!r}: must be an integer of at least 1")
    if num_slots % num_gpus:
        lower = num_slots // num_gpus * num_gpus
        use = f"use {lower or num_gpus} or {lower + num_gpus}"
        raise ValueError(f"num_slots={num_slots} is not a multiple of num_gpus={num_gpus}; {use}")
    if num_gpus % num_nodes:
        raise ValueError(f"num_gpus={num_gpus} is not a multiple of num_nodes={num_nodes}")


def check_slots(num_slots: int, num_experts: int, num_gpus: int, num_nodes: int) -> None:
    check_topology(num_slots, num_gpus, num_nodes)
    if num_slots < num_experts:
        least = fewest_slots(num_experts, num_gpus)
        raise ValueError(f"num_slots={num_slots} cannot hold {num_experts} experts; use at least {least}")


def _rectangular(rows: Any) -> Any:
    """rows, if each layer is a list of the same length; numpy's own message would not name the layer."""
    if isinstance(rows, list):
        for layer, row in enumerate(rows):
            if not isinstance(row, list) or len(row) != len(rows[0]):
                have = f"{len(row)} slots" if isinstance(row, list) else repr(row)
                raise ValueError(f"physical_to_logical_map[layer {layer}] has {have}; each layer needs the same number")
    return rows


def _as_slot_map(slots: np.ndarray) -> np.ndarray:
    slots_LP = np.asarray(slots)
    if slots_LP.ndim != 2 or 0 in slots_LP.shape:
        raise ValueError(f"physical_to_logical_map has shape {slots_LP.shape}; it must be [layers, slots], none empty")
    if slots_LP.dtype.kind not in "iu":
        raise ValueError(f"physical_to_logical_map has dtype {slots_LP.dtype}; it must hold integers")
    rule = "must be an expert (0 or more) or -1 for an empty slot"
    check_values(slots_LP < EMPTY, slots_LP, "physical_to_logical_map", ("layer", "slot"), rule)
    if slots_LP.max() == EMPTY:
        raise ValueError("physical_to_logical_map holds no expert at all: every slot is empty")
    return _frozen(slots_LP.astype(np.int64))


def _checked_weight(placement: Placement) -> np.ndarray:
    slots_LP = placement.physical_to_logical_map
    try:
        weight_LP = np.array(placement.slot_weight)
    except (TypeError, ValueError):
        weight_LP = np.empty(0, dtype=object)
    if weight_LP.dtype.kind not in "iuf":  # astype would convert strings and huge integers too
        raise ValueError("slot_weight must be equally long lists of numbers, one list per layer")
    weight_LP = weight_LP.astype(np.float64)
    if weight_LP.shape != slots_LP.shape:
        raise ValueError(f"slot_weight has shape {weight_LP.shape}; physical_to_logical_map has {slots_LP.shape}")
    bad_LP = ~(weight_LP >= 0) | ((slots_LP == EMPTY) & (weight_LP != 0))
    rule = "must be at least 0, and 0 where the slot is empty"
    check_values(bad_LP, weight_LP, "slot_weight", ("layer", "slot"), rule)
    sum_LE = np.zeros(placement.replica_count.shape)
    layer_LP = np.broadcast_to(np.arange(len(slots_LP))[:, None], slots_LP.shape)
    np.add.at(sum_LE, (layer_LP, np.maximum(slots_LP, 0)), weight_LP)
    bad = np.argwhere(np.abs(sum_LE - 1) > 1e-6)
    if len(bad):
        layer, expert = bad[0]
        total = sum_LE[layer, expert]
        raise ValueError(f"slot_weight[layer {layer}]: the slots of expert {expert} sum to {total}, not to 1")
    return _frozen(weight_LP)


def _frozen(array: np.ndarray) -> np.ndarray:
    array.setflags(write=False)
    return array
