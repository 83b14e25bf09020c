"""Migration schedule: the rounds and waves in which weights move while every expert stays available.

A round moves at most `spare` experts to each GPU and ends in a valid placement that takes effect on all GPUs at once;
until then the previous placement serves. A round is a sequence of waves; in a wave each GPU sends at most one expert
and receives at most one. P slots, G GPUs; a placement row is int64 [P], -1 for an empty slot, slot s on GPU
s // (P / G). Does not know how bytes travel (eprt/ep/migration/migrator.py does).
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .placement import EMPTY

Row = Sequence[int] | np.ndarray


@dataclass(frozen=True)
class Stream:
    """One expert of one layer, sent from the GPU `source` to the GPUs `readers`.

    A node other than the source's receives the bytes once, by its first reader (the entry), and fans them out.
    """

    layer: int
    expert: int
    source: int
    readers: tuple[int, ...]


@dataclass(frozen=True)
class Round:
    """Moves that take effect together."""

    rows: dict[int, tuple[int, ...]]  # layer -> its placement row after the round
    waves: tuple[tuple[Stream, ...], ...]  # what must be sent before the rows take effect

    def to_json(self) -> list[Any]:
        waves = [[[s.layer, s.expert, s.source, list(s.readers)] for s in wave] for wave in self.waves]
        return [[[layer, list(row)] for layer, row in self.rows.items()], waves]

    @staticmethod
    def from_json(data: Sequence[Any]) -> "Round":
        rows, waves = data
        return Round(
            {int(layer): tuple(row) for layer, row in rows},
            tuple(tuple(Stream(la, ex, so, tuple(re)) for la, ex, so, re in wave) for wave in waves),
        )


def schedule_rounds(
    current_LP: np.ndarray, target_LP: np.ndarray, node_of_gpu: Sequence[int], spare: int = 2
) -> list[Round]:
    """Rounds that turn the current placement into the target, slot by slot. Every expert keeps a copy throughout.

    Experts on full GPUs that replace each other in a cycle move in one round.

    spare: experts that each GPU has memory for beyond its slots, at least 1; more spare makes fewer, larger rounds.
    """
    current_LP, target_LP = np.asarray(current_LP), np.asarray(target_LP)
    if current_LP.shape != target_LP.shape:
        raise ValueError(f"the placements have shapes {current_LP.shape} and {target_LP.shape}; they must be equal")
    if spare < 1:
        raise ValueError(f"spare={spare}: must be at least 1, since a moving expert needs room")
    num_gpus = len(node_of_gpu)
    packed: list[dict[int, tuple[int, ...]]] = []
    used: list[np.ndarray] = []
    for layer in np.nonzero((current_LP != target_LP).any(1))[0].tolist():
        first = 0
        for row, arrivals_G in _layer_steps(current_LP[layer], target_LP[layer], node_of_gpu):
            while first < len(packed) and (used[first] + arrivals_G > spare).any():
                first += 1
            if first == len(packed):
                packed.append({})
                used.append(np.zeros(num_gpus, dtype=np.int64))
            packed[first][layer] = row
            used[first] += arrivals_G
    state_LP, rounds = current_LP.copy(), []
    for rows in packed:
        rounds.append(Round(rows, _waves(state_LP, rows, node_of_gpu)))
        for layer, row in rows.items():
            state_LP[layer] = row
    return rounds


def arrivals(old_P: Row, new_P: Row, num_gpus: int) -> list[tuple[int, int]]:
    """(expert, GPU) for each expert that a GPU holds in the new row but not in the old one."""
    old, new = _by_gpu(old_P, num_gpus), _by_gpu(new_P, num_gpus)
    return sorted((e, gpu) for gpu in range(num_gpus) for e in set(new[gpu]) - set(old[gpu]) - {EMPTY})


def count_moves(rounds: Sequence[Round], node_of_gpu: Sequence[int]) -> dict[str, int]:
    """Number of copies by path: "local" inside a node, "network" into a node, "fan_out" inside it afterwards."""
    counts = {"local": 0, "network": 0, "fan_out": 0}
    for stream in (stream for r in rounds for wave in r.waves for stream in wave):
        nodes = [node_of_gpu[reader] for reader in stream.readers]
        inside = nodes.count(node_of_gpu[stream.source])
        entries = len(set(nodes) - {node_of_gpu[stream.source]})
        counts["local"] += inside
        counts["network"] += entries
        counts["fan_out"] += len(nodes) - inside - entries
    return counts


def _by_gpu(row_P: Row, num_gpus: int) -> list[list[int]]:
    per_gpu = len(row_P) // num_gpus
    return [[int(e) for e in row_P[gpu * per_gpu : (gpu + 1) * per_gpu]] for gpu in range(num_gpus)]


# -- one layer: small steps, each from a valid row to a valid row ------------------------------------------------------


def _layer_steps(
    old_P: np.ndarray, new_P: np.ndarray, node_of_gpu: Sequence[int]
) -> Iterator[tuple[tuple[int, ...], np.ndarray]]:
    """(row after the step, arrivals per GPU). A step brings at most one expert to a GPU; the last row is new_P."""
    layer = _LayerInTransit(old_P, new_P, node_of_gpu)
    target = tuple(int(e) for e in new_P)
    if not any(layer.pending):
        yield target, np.zeros(len(node_of_gpu), dtype=np.int64)
    while any(layer.pending):
        arrivals_G = layer.next_step()
        yield (tuple(layer.row()) if any(layer.pending) else target), arrivals_G


class _LayerInTransit:
    """One layer between two placements. The slot of an expert inside its GPU does not matter before the last step."""

    def __init__(self, old_P: np.ndarray, new_P: np.ndarray, node_of_gpu: Sequence[int]):
        self.slots = _by_gpu(old_P, len(node_of_gpu))
        self.wanted = [set(row) - {EMPTY} for row in _by_gpu(new_P, len(node_of_gpu))]
        self.pending = [sorted(want - set(have)) for want, have in zip(self.wanted, self.slots)]
        self.node_of_gpu = node_of_gpu
        # How many GPUs hold each expert, and how many of each node; and how many of each node wait for it.
        self.copies = Counter(e for row in self.slots for e in set(row) - {EMPTY})
        self.on_node = Counter((n, e) for n, row in zip(node_of_gpu, self.slots) for e in set(row) - {EMPTY})
        self.awaited = Counter((n, e) for n, waiting in zip(node_of_gpu, self.pending) for e in waiting)

    def row(self) -> list[int]:
        return [expert for row in self.slots for expert in row]

    def next_step(self) -> np.ndarray:
        """Moves one expert to a free slot, or the experts of a cycle if there is none. Returns the arrivals per GPU."""
        arrivals_G = np.zeros(len(self.slots), dtype=np.int64)
        for gpu, slot, expert in self._into_free_slot() or self._cycle():
            node, replaced = self.node_of_gpu[gpu], self.slots[gpu][slot]
            self.slots[gpu][slot] = expert
            self.pending[gpu].remove(expert)
            self.awaited[node, expert] -= 1
            self.copies[expert] += 1
            self.on_node[node, expert] += 1
            if replaced != EMPTY and replaced not in self.slots[gpu]:
                self.copies[replaced] -= 1
                self.on_node[node, replaced] -= 1
            arrivals_G[gpu] += 1
        return arrivals_G

    def _into_free_slot(self) -> list[tuple[int, int, int]]:
        """A move (gpu, slot, arriving expert), if there is one."""
        for gpu, waiting in enumerate(self.pending):
            for slot in range(len(self.slots[gpu])) if waiting else ():
                if self._is_free(gpu, slot):
                    return [(gpu, slot, waiting[0])]
        return []

    def _is_free(self, gpu: int, slot: int) -> bool:
        """Whether nobody misses the slot's expert: neither its GPU, nor everybody, nor a GPU of its node that waits for
        it and would then have it from another node."""
        expert, node = self.slots[gpu][slot], self.node_of_gpu[gpu]
        if expert == EMPTY or self.slots[gpu].count(expert) > 1:
            return True
        if expert in self.wanted[gpu] or self.copies[expert] == 1:
            return False
        return self.on_node[node, expert] > 1 or not self.awaited[node, expert]

    def _cycle(self) -> list[tuple[int, int, int]]:
        """Moves (gpu, slot, arriving expert) around a cycle of GPUs without a free slot. Whatever such a GPU drops,
        another one waits for: one of its node where it can be. Following them from GPU to GPU closes a cycle."""
        gpu = next(g for g, waiting in enumerate(self.pending) if waiting)
        path: list[tuple[int, int]] = []  # gpu, slot of the expert that it drops
        while gpu not in [g for g, _ in path]:
            slot = next(s for s, expert in enumerate(self.slots[gpu]) if expert not in self.wanted[gpu])
            path.append((gpu, slot))
            dropped, node = self.slots[gpu][slot], self.node_of_gpu[gpu]
            waiting = [g for g, experts in enumerate(self.pending) if dropped in experts]
            gpu = next((g for g in waiting if self.node_of_gpu[g] == node), waiting[0])
        cycle = path[[g for g, _ in path].index(gpu) :]
        dropped_by = [self.slots[g][slot] for g, slot in cycle]
        return [(g, slot, dropped_by[i - 1]) for i, (g, slot) in enumerate(cycle)]


# -- one round: who sends to whom --------------------------------------------------------------------------------------


def _waves(
    state_LP: np.ndarray, rows: dict[int, tuple[int, ...]], node_of_gpu: Sequence[int]
) -> tuple[tuple[Stream, ...], ...]:
    sending = [0] * len(node_of_gpu)  # number of streams that each GPU sends in this round
    streams = []
    for layer, row in rows.items():
        readers_of: dict[int, list[int]] = {}
        for expert, gpu in arrivals(state_LP[layer], row, len(node_of_gpu)):
            readers_of.setdefault(expert, []).append(gpu)
        held = _by_gpu(state_LP[layer], len(node_of_gpu))
        for expert, readers in readers_of.items():
            holders = [gpu for gpu, experts in enumerate(held) if expert in experts]
            streams += _streams(layer, expert, holders, readers, node_of_gpu, sending)
    waves: list[list[Stream]] = []
    for stream in sorted(streams, key=lambda s: -len(s.readers)):
        for wave in waves:
            if all(stream.source != s.source and not set(stream.readers) & set(s.readers) for s in wave):
                wave.append(stream)
                break
        else:
            waves.append([stream])
    return tuple(tuple(wave) for wave in waves)


def _streams(
    layer: int, expert: int, holders: list[int], readers: list[int], node_of_gpu: Sequence[int], sending: list[int]
) -> list[Stream]:
    """The nearest holder sends, the least busy of equally near ones; a holder sends once to all of its readers."""
    readers_of_source: dict[int, list[int]] = {}
    for node in sorted({node_of_gpu[reader] for reader in readers}):
        near = [holder for holder in holders if node_of_gpu[holder] == node] or holders
        source = min(near, key=lambda holder: (holder not in readers_of_source, sending[holder]))
        if source not in readers_of_source:
            sending[source] += 1
        readers_of_source.setdefault(source, []).extend(r for r in readers if node_of_gpu[r] == node)
    return [Stream(layer, expert, source, tuple(there)) for source, there in readers_of_source.items()]
