"""What tokens cross between nodes, counted slowly, token by token and node by node."""

from itertools import combinations

import numpy as np


def nodes_of(placement, layer):
    """{expert: set of the nodes that hold it}"""
    per_node = placement.num_slots // placement.num_nodes
    where = {}
    for slot, expert in enumerate(placement.physical_to_logical_map[layer].tolist()):
        if expert >= 0:
            where.setdefault(expert, set()).add(slot // per_node)
    return where


def visits(experts, own, where):
    """Other nodes visited: first those without an alternative, then greedily the one that covers most."""
    left = [where[e] for e in experts if own not in where[e]]
    visited = {next(iter(nodes)) for nodes in left if len(nodes) == 1}
    left = [nodes for nodes in left if not nodes & visited]
    while left:
        best = min(set().union(*left), key=lambda n: (-sum(n in nodes for nodes in left), n))
        visited.add(best)
        left = [nodes for nodes in left if best not in nodes]
    return len(visited)


def fewest_visits(experts, own, where):
    """The smallest number of other nodes that cover the experts, by trying all sets."""
    left = [where[e] for e in experts if own not in where[e]]
    nodes = sorted(set().union(*left)) if left else []
    for size in range(len(nodes) + 1):
        if any(all(one & set(chosen) for one in left) for chosen in combinations(nodes, size)):
            return size
    raise AssertionError("some expert is nowhere")


def messages(experts, own, where):
    return sum(own not in where[e] for e in experts)


def traffic(placement, trace, layer, count):
    """Crossings per token; tokens whose node is not known are on each node equally often."""
    where = nodes_of(placement, layer)
    total = 0.0
    for token, row in enumerate(trace.topk_idx[layer].tolist()):
        experts = [e for e in row if e >= 0]
        if trace.source_gpu is None:
            owns = range(placement.num_nodes)
        else:
            owns = [int(trace.source_gpu[layer][token]) // (placement.num_gpus // placement.num_nodes)]
        total += np.mean([count(experts, own, where) for own in owns])
    return total / len(trace.topk_idx[layer])
