"""Recovery placement: which experts the ranks of a new view load, when others have taken experts with them.

Pure: from what the slots hold to what they are to hold. Knows nothing of how ranks load experts, nor of their load.
"""

from collections.abc import Mapping, Sequence

import numpy as np

EMPTY = -1


class CapacityError(RuntimeError):
    """The ranks that are left have fewer slots than the model has experts."""


def capacity_words(num_experts: int, num_slots: int, num_ranks: int) -> str:
    """Why num_ranks ranks of num_slots slots each, too few, cannot hold the experts."""
    ranks = f"{num_ranks} rank{'' if num_ranks == 1 else 's'}"
    return (
        f"{ranks} of {num_slots} slots per MoE layer hold {num_ranks * num_slots} experts; the model has {num_experts}"
    )


def check_capacity(num_experts: int, num_redundant: int, num_ranks: int, max_lost: int) -> None:
    """Raises CapacityError, with the remedy, where num_ranks - max_lost ranks cannot hold every expert."""
    num_slots, num_left = -(-(num_experts + num_redundant) // num_ranks), num_ranks - max_lost
    if num_left < 1:
        raise CapacityError(f"{num_ranks} ranks cannot lose {max_lost}: one must be left")
    if num_left * num_slots < num_experts:
        wanted = num_ranks * -(-num_experts // num_left) - num_experts
        words = capacity_words(num_experts, num_slots, num_left)
        raise CapacityError(
            f"without {max_lost} of {num_ranks} ranks, {words}: --num-redundant-experts {wanted} would do"
        )


def recovery_rows(contents: Mapping[int, Sequence[Sequence[int]]], num_ranks: int, num_experts: int) -> list[list[int]]:
    """Per MoE layer, the expert of every slot of all ranks; slots of ranks without contents are EMPTY.

    contents: of the ranks that are left, per layer what each of its slots holds. What they hold stays. Experts that
    nobody holds go into empty slots first, then into those of the experts with most replicas; each time to the rank
    that has least to load. Deterministic. CapacityError where they do not fit.
    """
    first = next(iter(contents.values()))
    if not first:
        return []
    num_layers, num_slots = len(first), len(first[0])
    held_LNS = np.full((num_layers, num_ranks, num_slots), EMPTY, dtype=np.int64)
    for rank, rows in contents.items():
        held_LNS[:, rank] = rows
    if len(contents) * num_slots < num_experts:
        raise CapacityError(capacity_words(num_experts, num_slots, len(contents)))
    num_loads_N = np.zeros(num_ranks, dtype=np.int64)  # of all layers: a rank loads them together
    for held_NS in held_LNS:
        _place_missing(held_NS, sorted(contents), num_experts, num_loads_N)
    return held_LNS.reshape(num_layers, -1).tolist()


def rows_without_loading(
    rows: Sequence[Sequence[int]], contents: Mapping[int, Sequence[Sequence[int]]]
) -> list[list[int]]:
    """rows of recovery_rows(contents), less what its rank would have to load: those slots are EMPTY."""
    reduced = [list(row) for row in rows]
    for rank, held_L in contents.items():
        for row, held in zip(reduced, held_L):
            slots = slice(rank * len(held), (rank + 1) * len(held))
            row[slots] = [expert if expert in held else EMPTY for expert in row[slots]]
    return reduced


def count_missing(rows: Sequence[Sequence[int]], num_experts: int) -> int:
    """Experts without a slot, of all layers together."""
    return sum(num_experts - len(set(row) - {EMPTY}) for row in rows)


def _place_missing(held_NS: np.ndarray, ranks: Sequence[int], num_experts: int, num_loads_N: np.ndarray) -> None:
    """Writes one layer's missing experts into held_NS."""
    rank_R = np.array(ranks)
    held_RS = held_NS[rank_R]
    count_E = np.bincount(held_RS[held_RS != EMPTY], minlength=num_experts)
    for expert in np.flatnonzero(count_E == 0).tolist():
        # The smallest is taken: 0 for an empty slot, less for more replicas, infinite for an expert's only slot.
        count_RS = np.where(held_RS == EMPTY, np.inf, count_E[held_RS])
        cost_RS = np.where(count_RS > 1, 1 / count_RS, np.inf)
        best_RS = cost_RS == cost_RS.min()
        load_RS = np.where(best_RS, num_loads_N[rank_R, None], np.iinfo(np.int64).max)
        row, slot = divmod(int(load_RS.argmin()), held_RS.shape[1])
        if held_RS[row, slot] != EMPTY:
            count_E[held_RS[row, slot]] -= 1
        held_RS[row, slot] = expert
        count_E[expert] = 1
        num_loads_N[rank_R[row]] += 1
    held_NS[rank_R] = held_RS
