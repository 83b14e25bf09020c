"""EPLB in plain Python, slot by slot and without a heap: the slow oracle of rebalance_experts and of plan()'s promise
never to be worse. Sums are exact in fp32 as long as loads are whole numbers below 2**24.

number: what sums are made in: np.float32, as DeepSeek and SGLang do (torch), or np.float64, as vLLM does (numpy).
rng: equal loads come in an order drawn from it, as from a sort that is not stable; without it in their own.
"""

import numpy as np


def pack(loads, num_packs, number=np.float32, rng=None):
    """[(pack, place)] of each item: the heaviest first, each onto the lightest pack that has room."""
    capacity = len(loads) // num_packs
    if capacity == 1:
        return [(i, 0) for i in range(len(loads))]
    total, held, where = [number(0)] * num_packs, [0] * num_packs, [(0, 0)] * len(loads)
    tie = range(len(loads)) if rng is None else rng.permutation(len(loads))
    for item in sorted(range(len(loads)), key=lambda i: (-loads[i], tie[i])):
        best = min((p for p in range(num_packs) if held[p] < capacity), key=lambda p: total[p])
        where[item] = (best, held[best])
        total[best] += loads[item]
        held[best] += 1
    return where


def replicate(loads, num_slots, number=np.float32):
    """(expert, replica) of each slot."""
    count = [1] * len(loads)
    slots = [(expert, 0) for expert in range(len(loads))]
    while len(slots) < num_slots:
        busiest = max(range(len(loads)), key=lambda e: (loads[e] / number(count[e]), -e))
        slots.append((busiest, count[busiest]))
        count[busiest] += 1
    return slots, count


def eplb_layer(load_E, num_slots, num_groups, num_nodes, num_gpus, number=np.float32, rng=None):
    """[(expert, replica)] of each slot."""
    if num_groups % num_nodes:
        num_groups = num_nodes = 1
    load_E = [np.float32(x) for x in load_E]
    size, slots_per_node, gpus_per_node = len(load_E) // num_groups, num_slots // num_nodes, num_gpus // num_nodes
    group_loads = [np.float32(sum(map(float, load_E[g * size : (g + 1) * size]))) for g in range(num_groups)]
    experts_of = [[None] * (num_groups // num_nodes) for _ in range(num_nodes)]
    for group, (node, place) in enumerate(pack(group_loads, num_nodes, number, rng)):
        experts_of[node][place] = range(group * size, (group + 1) * size)
    out = [None] * num_slots
    for node, groups in enumerate(experts_of):
        experts = [expert for group in groups for expert in group]
        loads = [number(load_E[e]) for e in experts]
        slots, count = replicate(loads, slots_per_node, number)
        shares = [loads[local] / number(count[local]) for local, _ in slots]
        for (local, replica), (gpu, place) in zip(slots, pack(shares, gpus_per_node, number, rng)):
            slot = node * slots_per_node + gpu * (num_slots // num_gpus) + place
            out[slot] = (experts[local], replica)
    return out


def largest_load(slots, load_E, num_gpus):
    """The busiest GPU's load when replicas share evenly."""
    count = {}
    for expert, _ in slots:
        count[expert] = count.get(expert, 0) + 1
    shares = [load_E[expert] / count[expert] for expert, _ in slots]
    per_gpu = len(slots) // num_gpus
    return max(sum(shares[g * per_gpu : (g + 1) * per_gpu]) for g in range(num_gpus))
