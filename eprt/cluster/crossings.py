"""To how many nodes, ranks and experts a token goes, in the mean over uniformly chosen experts.

Of n equal parts of the experts (nodes or ranks), a part that holds m of the pool of experts that a token may use is
missed by its K choices with probability prod over i < K of (pool - m - i) / (pool - i); m need not be whole. With
group-limited gates (DeepSeek-V3: 4 of 8 groups) the pool is the chosen groups, and the mean is over their choices.
"""

import functools
import itertools
import math
from dataclasses import dataclass


@dataclass(frozen=True)
class ExpertChoice:
    """How a layer's gate chooses experts."""

    num_experts: int
    top_k: int
    num_groups: int = 1
    num_chosen_groups: int = 1


@functools.cache
def parts_hit(gate: ExpertChoice, num_parts: int) -> float:
    """Expected number of parts, of num_parts equal ones, that hold an expert of a token."""
    group_size, part_size = gate.num_experts / gate.num_groups, gate.num_experts / num_parts
    pool = gate.num_chosen_groups * group_size
    chosen = list(itertools.combinations(range(gate.num_groups), gate.num_chosen_groups))
    hit = 0.0
    for part in range(num_parts):
        held = [
            _overlap(part * part_size, part_size, group * group_size, group_size) for group in range(gate.num_groups)
        ]
        hit += sum(1 - _missed(pool, sum(held[group] for group in groups), gate.top_k) for groups in chosen)
    return hit / len(chosen)


def parts_elsewhere(gate: ExpertChoice, num_parts: int) -> float:
    """The same without the token's own part."""
    return parts_hit(gate, num_parts) * (num_parts - 1) / num_parts


def experts_elsewhere(gate: ExpertChoice, num_parts: int) -> float:
    """Of a token's K experts, those outside of its own part."""
    return gate.top_k * (1 - 1 / num_parts)


def experts_touched(gate: ExpertChoice, num_slots: float, tokens_of_all: float, num_slots_of_all: float) -> float:
    """Expected number of num_slots slots of a rank that receive a token, when tokens_of_all choose K each."""
    return num_slots * (1 - (1 - 1 / num_slots_of_all) ** (tokens_of_all * gate.top_k))


def _overlap(begin: float, size: float, other: float, other_size: float) -> float:
    return max(0.0, min(begin + size, other + other_size) - max(begin, other))


def _missed(pool: float, held: float, draws: int) -> float:
    """That none of `draws` experts, drawn from pool without repeats, is among the part's `held`."""
    if pool - held < draws:
        return 0.0
    return math.prod((pool - held - i) / (pool - i) for i in range(draws))
