"""plan(): from measured expert load to a Placement.

Policy, per layer: give the spare slots one after another to the expert whose copies are busiest, then pack the copies
onto GPUs, largest first, each onto the least loaded GPU that has room and no copy of that expert yet. With groups that
divide over the nodes, whole groups are packed onto nodes first (so that group-limited routing stays inside few nodes)
and each node is planned by itself.
"""

import heapq
from collections.abc import Sequence
from typing import Any

import numpy as np

from .loads import check_load
from .placement import EMPTY, Placement, check_slots, contiguous_row, fewest_slots
from .trace import RoutingTrace


def plan(
    load_LE: np.ndarray,
    *,
    num_slots: int | None = None,
    num_gpus: int,
    num_nodes: int = 1,
    num_groups: int = 1,
    coactivation: RoutingTrace | np.ndarray | None = None,
    current: Placement | None = None,
    max_moves_per_layer: int | None = None,
    max_bytes: float | None = None,
    bytes_per_expert: float | np.ndarray | None = None,
    min_gain: float = 0.001,
    traffic: str = "node_copies",
    balance_allowance: float = 0.05,
    gpu_speed: np.ndarray | None = None,
    usable_slots: int | np.ndarray | None = None,
    min_gpus_per_expert: int = 1,
    seed: int = 0,
    threads: int | None = None,
) -> Placement:
    """Chooses which experts get copies and where each copy lives; never two copies of one expert on one GPU.

    load_LE: [L, E], tokens (or any other additive cost) per expert; finite, not negative.
    num_slots: P, default the fewest that hold all experts (or those of current); a multiple of num_gpus.
    num_groups: expert groups of the router; whole inside nodes when num_nodes divides num_groups, else ignored.
    coactivation: a RoutingTrace (traffic is recounted exactly) or a symmetric [L, E, E] matrix of tokens that chose
        both. Experts are then laid out, and copied across nodes, for less traffic.
    current: the placement in force. The plan then changes at most max_moves_per_layer (default 8) slots per layer, the
        most useful first, and stops where a move lowers the largest GPU load by less than min_gain of the mean.
    max_bytes, bytes_per_expert (number or [L]): a limit over all layers, instead of or beside max_moves_per_layer.
    traffic: "node_copies" (a token crosses once to each node that computes it) or "expert_messages" (once per expert
        without a copy on the token's own node).
    balance_allowance: the fraction by which the largest GPU load may exceed the balance-only plan's for less traffic.
    gpu_speed: [G], relative; load is balanced in proportion. 0: the GPU is masked and holds nothing.
    usable_slots: slots per GPU to fill, broadcast to [L, G]; default all. The rest stay EMPTY (-1).
    min_gpus_per_expert: 2 survives the loss of any one rank.
    seed: 0 breaks ties by index; any other value by a random order drawn from it. threads: default one per core.
    ValueError names field, layer and value.
    """
    _refuse_unsupported(locals())
    load_LE = check_load(load_LE)
    num_experts = load_LE.shape[1]
    num_slots = fewest_slots(num_experts, num_gpus) if num_slots is None else num_slots
    check_slots(num_slots, num_experts, num_gpus, num_nodes)
    if num_groups < 1 or num_experts % num_groups:
        raise ValueError(f"num_groups={num_groups} does not divide the {num_experts} experts")

    hierarchical = num_nodes > 1 and num_groups > 1 and num_groups % num_nodes == 0
    num_parts = num_nodes if hierarchical else 1
    order_E = np.arange(num_experts) if seed == 0 else np.random.default_rng(seed).permutation(num_experts)
    slots_LP = np.stack(
        [_plan_layer(load_E, num_slots, num_gpus, num_parts, num_groups, order_E) for load_E in load_LE]
    )
    placement = Placement(slots_LP, num_gpus, num_nodes)
    policy = "hierarchical" if hierarchical else "global"
    return Placement(slots_LP, num_gpus, num_nodes, metrics=_metrics(placement, load_LE, policy))


def _refuse_unsupported(arguments: dict[str, Any]) -> None:
    defaults = {"coactivation": None, "current": None, "max_moves_per_layer": None, "max_bytes": None}
    defaults |= {"bytes_per_expert": None, "gpu_speed": None, "usable_slots": None, "min_gpus_per_expert": 1}
    for name, default in defaults.items():
        if arguments[name] is not default:
            raise ValueError(f"{name}: plan() does not support it yet; leave it out to plan from scratch")


def _plan_layer(
    load_E: np.ndarray, num_slots: int, num_gpus: int, num_parts: int, num_groups: int, order_E: np.ndarray
) -> np.ndarray:
    """int64 [P]. The GPUs form num_parts equal parts; each takes num_groups / num_parts whole groups."""
    if num_parts == 1:
        return _plan_part(load_E, num_slots, num_gpus, order_E)
    if (load_E == load_E[0]).all():  # in order, so that equal loads give the contiguous placement
        part_of_group = np.arange(num_groups) * num_parts // num_groups
    else:
        part_of_group = _pack_groups(load_E.reshape(num_groups, -1).sum(1), num_parts)
    part_of_E = np.repeat(part_of_group, len(load_E) // num_groups)
    rows = []
    for part in range(num_parts):
        (expert_idx,) = np.nonzero(part_of_E == part)
        order = np.argsort(np.argsort(order_E)[expert_idx])
        row = _plan_part(load_E[expert_idx], num_slots // num_parts, num_gpus // num_parts, order)
        rows.append(np.where(row == EMPTY, EMPTY, expert_idx[row]))
    return np.concatenate(rows)


def _plan_part(load_E: np.ndarray, num_slots: int, num_gpus: int, order_E: np.ndarray) -> np.ndarray:
    if (load_E == load_E[0]).all():
        return _contiguous_and_filled(len(load_E), num_slots, num_gpus)
    count_E = _replicate(load_E, num_slots, num_gpus, order_E)
    return _pack(load_E / count_E, count_E, num_gpus, order_E)


def _contiguous_and_filled(num_experts: int, num_slots: int, num_gpus: int) -> np.ndarray:
    """The contiguous row; each slot to spare takes the next expert, round robin, that its GPU does not hold yet."""
    row_GP = contiguous_row(num_experts, num_gpus, num_slots).reshape(num_gpus, -1)
    expert = 0
    for gpu, slot in np.argwhere(row_GP == EMPTY):
        for _ in range(num_experts):
            if expert not in row_GP[gpu]:
                break
            expert = (expert + 1) % num_experts
        row_GP[gpu, slot] = expert
        expert = (expert + 1) % num_experts
    return row_GP.reshape(-1)


def _replicate(load_E: np.ndarray, num_slots: int, num_gpus: int, order_E: np.ndarray) -> np.ndarray:
    """int64 [E]: copies per expert, summing to num_slots; the largest load per copy is as small as it can be.

    No expert gets more copies than there are GPUs while another can still take one: the extra copy would have to share
    a GPU with its twin, which relieves nothing.
    """
    count_E = np.ones(len(load_E), dtype=np.int64)
    rank_E = np.argsort(order_E)
    heap = [(-load, int(rank), expert) for expert, (load, rank) in enumerate(zip(load_E.tolist(), rank_E))]
    heapq.heapify(heap)
    full: list[int] = []
    for _ in range(num_slots - len(load_E)):
        while heap and count_E[heap[0][2]] >= num_gpus:
            full.append(heapq.heappop(heap)[2])
        if not heap:  # more slots than distinct (expert, GPU) pairs: twins on one GPU cannot be avoided
            expert = full[int(np.argmax(load_E[full] / count_E[full]))]
            count_E[expert] += 1
            continue
        _, rank, expert = heap[0]
        count_E[expert] += 1
        heapq.heapreplace(heap, (-load_E[expert] / count_E[expert], rank, expert))
    return count_E


def _pack(share_E: np.ndarray, count_E: np.ndarray, num_gpus: int, order_E: np.ndarray) -> np.ndarray:
    """int64 [P]: every copy on a GPU, equally many on each, ascending by expert inside a GPU."""
    capacity = int(count_E.sum()) // num_gpus
    held: list[set[int]] = [set() for _ in range(num_gpus)]  # distinct experts
    slots: list[list[int]] = [[] for _ in range(num_gpus)]
    load_G = [0.0] * num_gpus
    for expert in np.lexsort((np.argsort(order_E), -share_E)).tolist():
        share = float(share_E[expert])
        for _ in range(int(count_E[expert])):
            free = [g for g in range(num_gpus) if len(slots[g]) < capacity]
            fresh = [g for g in free if expert not in held[g]]
            gpu = min(fresh or free, key=load_G.__getitem__)
            if not fresh:
                gpu = _make_room(expert, gpu, slots, held, load_G, share_E)
            slots[gpu].append(expert)
            held[gpu].add(expert)
            load_G[gpu] += share
    return np.array([sorted(experts) for experts in slots], dtype=np.int64).reshape(-1)


def _make_room(
    expert: int,
    free_gpu: int,
    slots: list[list[int]],
    held: list[set[int]],
    load_G: list[float],
    share_E: Sequence[float] | np.ndarray,
) -> int:
    """The GPU to put a copy of expert on when every GPU with room holds one already.

    Some full GPU without a copy passes one of its experts that free_gpu lacks on to free_gpu. While copies do not
    outnumber GPUs such a pair exists: a full GPU holds more experts than free_gpu, none of them twice. Among all pairs
    the one with the smallest larger load is taken. Returns free_gpu when every GPU holds a copy.
    """
    best: tuple[float, int, int] | None = None
    for gpu, experts in enumerate(slots):
        if expert in held[gpu]:
            continue
        for other in experts:
            if other in held[free_gpu]:
                continue
            moved = share_E[other]
            peak = max(load_G[free_gpu] + moved, load_G[gpu] - moved + share_E[expert])
            if best is None or peak < best[0]:
                best = (float(peak), gpu, other)
    if best is None:
        return free_gpu
    _, gpu, other = best
    slots[gpu].remove(other)
    held[gpu].discard(other)
    slots[free_gpu].append(other)
    held[free_gpu].add(other)
    load_G[gpu] -= float(share_E[other])
    load_G[free_gpu] += float(share_E[other])
    return gpu


def _pack_groups(load_groups: np.ndarray, num_parts: int) -> np.ndarray:
    """int64 [groups]: the part each group goes to, equally many each: largest first onto the least loaded part."""
    capacity = len(load_groups) // num_parts
    part_of_group = np.empty(len(load_groups), dtype=np.int64)
    count, load = [0] * num_parts, [0.0] * num_parts
    for group in np.argsort(-load_groups, kind="stable").tolist():
        part = min((p for p in range(num_parts) if count[p] < capacity), key=load.__getitem__)
        part_of_group[group] = part
        count[part] += 1
        load[part] += float(load_groups[group])
    return part_of_group


def _metrics(placement: Placement, load_LE: np.ndarray, policy: str) -> dict[str, Any]:
    """max/mean of the GPU loads (1.0 is even), averaged over layers and of the worst layer; layers without load: 1."""
    load_LG = placement.gpu_load(load_LE)
    mean_L = load_LG.mean(1)
    skew_L = np.divide(load_LG.max(1), mean_L, out=np.ones_like(mean_L), where=mean_L > 0)
    worst = int(skew_L.argmax())
    return {
        "policy": policy,
        "max_over_mean": float(skew_L.mean()),
        "max_over_mean_worst_layer": float(skew_L[worst]),
        "worst_layer": worst,
    }
