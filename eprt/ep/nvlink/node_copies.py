"""Whether between nodes one copy of a token for each node is predicted to be faster than one for each rank.

The planner's model (eprt.cluster.exchange_time) for cards of 50 GB/s, whose start both ways share: bytes over the cards
count, and the time until a rank has handed on. Knows nothing of the network that there is.
"""

import math

from eprt.ep.nvlink.low_latency_layout import LowLatencyHeap

_DISPATCH_GBps, _COMBINE_GBps = 46.4, 39.9  # of a card, as DeepEP V1 used it for dispatch and combine
_HAND_ON_US = 6.0  # assumed, for each of the two


def parts_elsewhere(num_slots: int, top_k: int, num_parts: int) -> float:
    """To how many of num_parts equal parts of the slots, but its own, a token goes in the mean, if each choice of top_k
    slots is as likely."""
    others = num_slots - num_slots // num_parts
    missed = math.comb(others, top_k) / math.comb(num_slots, top_k)
    return (num_parts - 1) * (1 - missed)


def ranks_elsewhere(num_slots: int, top_k: int, num_ranks: int, num_nodes: int) -> float:
    """The same of ranks on other nodes."""
    return parts_elsewhere(num_slots, top_k, num_ranks) / (num_ranks - 1) * (num_ranks - num_ranks // num_nodes)


def node_copies_are_faster(shape: LowLatencyHeap) -> bool:
    """For batches of shape.max_tokens on each rank."""
    num_slots, top_k = shape.num_ranks * shape.num_local_slots, shape.top_k
    if shape.num_nodes == 1 or shape.num_nodes == shape.num_ranks:
        return False
    by_rank = ranks_elsewhere(num_slots, top_k, shape.num_ranks, shape.num_nodes)
    saved = by_rank - parts_elsewhere(num_slots, top_k, shape.num_nodes)
    bytes_us = shape.payload_bytes / _DISPATCH_GBps + shape.hidden * 2 / _COMBINE_GBps
    return shape.max_tokens * saved * bytes_us * 1e-3 > 2 * _HAND_ON_US
