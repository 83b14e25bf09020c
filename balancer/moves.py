"""Moves between two placements: which slots receive weights, and how to rename GPUs so that fewer do.

Knows neither rounds of a migration (migration.py) nor bytes.
"""

from dataclasses import replace

import numpy as np
from scipy.optimize import linear_sum_assignment

from .placement import EMPTY, Placement


def moved_slots(before: Placement, after: Placement) -> np.ndarray:
    """bool [L, P]: slots of `after` whose expert their GPU did not hold before: another GPU must send its weights. A
    change of slots inside a GPU does not count: that is a copy in local memory or a renaming."""
    check_same_shape(before, after)
    moved_LP = np.zeros(after.physical_to_logical_map.shape, dtype=bool)
    for gpu in range(after.num_gpus):
        own = slice(gpu * after.num_slots_per_gpu, (gpu + 1) * after.num_slots_per_gpu)
        was, now = before.physical_to_logical_map[:, own], after.physical_to_logical_map[:, own]
        moved_LP[:, own] = (now[:, :, None] != was[:, None, :]).all(-1) & (now != EMPTY)
    return moved_LP


def aligned(plan: Placement, current: Placement) -> Placement:
    """The same plan with GPUs of equal speed and size exchanged inside each node and slots reordered inside each GPU so
    that fewer slots move. The exchange is optimal per layer and node (an assignment problem)."""
    check_same_shape(current, plan)
    slots_LP = np.empty_like(plan.physical_to_logical_map)
    weight_LP = np.empty(slots_LP.shape)
    per_gpu = plan.num_slots_per_gpu
    per_node = plan.num_gpus // plan.num_nodes
    for layer in range(plan.num_layers):
        now_GS = current.physical_to_logical_map[layer].reshape(-1, per_gpu)
        new_GS = plan.physical_to_logical_map[layer].reshape(-1, per_gpu)
        new_weight_GS = plan.weight_LP[layer].reshape(-1, per_gpu)
        held_GE, wanted_GE = _held(now_GS, plan.num_experts), _held(new_GS, plan.num_experts)
        for first in range(0, plan.num_gpus, per_node):
            node = slice(first, first + per_node)
            shared_GG = held_GE[node] @ wanted_GE[node].T
            for gpu, source in zip(*linear_sum_assignment(shared_GG, maximize=True)):
                own = slice((first + gpu) * per_gpu, (first + gpu + 1) * per_gpu)
                order = _keep_slots(now_GS[first + gpu], new_GS[first + source])
                slots_LP[layer, own] = new_GS[first + source][order]
                weight_LP[layer, own] = new_weight_GS[first + source][order]
    return replace(plan, physical_to_logical_map=slots_LP, slot_weight=weight_LP)


def check_same_shape(before: Placement, after: Placement) -> None:
    for name in ("num_layers", "num_slots", "num_gpus", "num_nodes", "num_experts"):
        was, now = getattr(before, name), getattr(after, name)
        if was != now:
            rule = "the placements belong to different models or clusters"
            raise ValueError(f"{name}: {was} before and {now} after; {rule}")


def _held(experts_GS: np.ndarray, num_experts: int) -> np.ndarray:
    held_GE = np.zeros((len(experts_GS), num_experts + 1))
    np.put_along_axis(held_GE, experts_GS, 1.0, axis=1)  # -1 falls into the column that is cut off
    return held_GE[:, :num_experts]


def _keep_slots(now_S: np.ndarray, new_S: np.ndarray) -> np.ndarray:
    """An order of new_S in which every expert that is also in now_S keeps its slot."""
    order = np.full(len(new_S), -1)
    left = list(range(len(new_S)))
    for slot, expert in enumerate(now_S):
        if (index := next((i for i in left if new_S[i] == expert), None)) is not None:
            order[slot] = index
            left.remove(index)
    order[order < 0] = left
    return order
