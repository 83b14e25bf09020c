"""MigrationRound: one round of a migration on one rank: which bytes are due, where they go, and what serves afterwards.

Every rank keeps the same account of what is due (wave, first byte, bytes), whether or not it has a part in it.
"""

import time
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from eprt.balancer.migration import Round, Stream, arrivals
from eprt.ep.group.group import EPGroup
from eprt.ep.migration.chunk import ExpertChunk, WeightPool
from eprt.ep.placement.slot_map import SlotMap


class MovableLayer(Protocol):
    """A layer whose experts can move: see layers/moe.py EPMoE."""

    slot_map: SlotMap

    @property
    def pool(self) -> WeightPool: ...
    def weight_buffers(self) -> list[int]:
        """Which buffer of the pool holds each local slot's expert, -1 for none."""
        ...

    def place(self, slot_map: SlotMap, buffers: Sequence[int]) -> None:
        """From now on the slots hold what slot_map says, in these buffers."""
        ...


class _Due(NamedTuple):
    wave: int
    start: int
    size: int


class Placed(NamedTuple):
    """What a layer's slots hold."""

    slot_map: SlotMap
    buffers: list[int]  # which buffer of the pool holds each local slot's expert, -1 for none


class MigrationRound:
    """What one rank knows of the round that is under way."""

    def __init__(self, plan: Round, layers: Sequence[MovableLayer], group: EPGroup):
        self.plan, self._layers, self._group = plan, layers, group
        self.started_s: float | None = None  # when this rank began
        self.committed = False  # its placement serves
        self.worked_tick = 0  # of the latest chunks sent
        self._wave = self._start = 0
        self._leaving: _Due | None = None  # sent in this tick
        self._arriving: _Due | None = None  # sent in the one before, received now
        self._longest = [max(self._bytes(s) for s in wave) for wave in plan.waves]
        rank = group.rank
        self._mine = [[s for s in wave if rank == s.source or rank in s.readers] for wave in plan.waves]
        streams = [s for wave in self._mine for s in wave]
        self._arrival_of = {
            (s.layer, s.expert): layers[s.layer].pool.take_buffer() for s in streams if s.source != rank
        }
        sent = {(s.layer, s.expert): held(layers[s.layer], group)[s.expert] for s in streams if s.source == rank}
        self._buffer_of = self._arrival_of | sent
        self._placed: dict[int, Placed] = {}  # layer -> what serves from the commit on

    @property
    def arriving_bytes(self) -> int:
        """Memory of the experts that this rank gets in the round."""
        return sum(self._layers[layer].pool.expert_bytes for layer, _ in self._arrival_of)

    # -- what travels --

    def begin_tick(self, chunk_bytes: int) -> None:
        """The next tick begins, on all ranks alike, with chunks of at most chunk_bytes."""
        self._arriving, self._leaving = self._leaving, None
        if self._wave < len(self._longest):
            self._leaving = _Due(self._wave, self._start, chunk_bytes)
            self._start += chunk_bytes
            if self._start >= self._longest[self._wave]:
                self._wave, self._start = self._wave + 1, 0

    @property
    def has_moved(self) -> bool:
        """In this tick nothing leaves any more on any rank: at its end everything has arrived."""
        return self._leaving is None

    def leaving(self) -> list[ExpertChunk]:
        """What is sent in this tick, by this rank or to it; at most one of each."""
        return self._chunks(self._leaving)

    def arriving(self) -> list[ExpertChunk]:
        """What was sent to this rank in the tick before; at most one."""
        return [chunk for chunk in self._chunks(self._arriving) if chunk.stream.source != self._group.rank]

    def under_way(self) -> str:
        """What this rank sends or receives now, for a message."""
        return ", ".join(str(chunk.stream) for chunk in (*self.leaving(), *self.arriving())) or "nothing of its own"

    def release(self) -> None:
        """Gives back what would have held the arrivals."""
        for (layer, _), buffer in self._arrival_of.items():
            self._layers[layer].pool.return_buffer(buffer)

    def _chunks(self, due: _Due | None) -> list[ExpertChunk]:
        if due is None:
            return []
        return [
            ExpertChunk(
                stream,
                self._layers[stream.layer].pool,
                self._buffer_of[stream.layer, stream.expert],
                due.start,
                min(due.size, self._bytes(stream) - due.start),
            )
            for stream in self._mine[due.wave]
            if due.start < self._bytes(stream)
        ]

    def _bytes(self, stream: Stream) -> int:
        return self._layers[stream.layer].pool.expert_bytes

    # -- what serves afterwards --

    def prepare(
        self, weights: dict[int, tuple[float, ...]], node_of_rank: Sequence[int] | None, budget_s: float
    ) -> bool:
        """Makes the slot maps of the round's layers, one at least, as many as the time allows; True when all are made.

        weights: layer -> share of each slot, of layers that have reached their last row.
        """
        until_s = time.perf_counter() + budget_s
        for row in self.plan.rows:
            if row not in self._placed:
                self._placed[row] = self._place(row, weights.get(row), node_of_rank)
                if time.perf_counter() >= until_s:
                    break
        return len(self._placed) == len(self.plan.rows)

    def _place(self, row: int, weight_S: Sequence[float] | None, node_of_rank: Sequence[int] | None) -> Placed:
        layer, group = self._layers[row], self._group
        slot_map = SlotMap.from_row(
            np.array(self.plan.rows[row]),
            layer.slot_map.num_experts,
            weight_S=None if weight_S is None else np.array(weight_S),
            rank=group.rank,
            node_of_rank=node_of_rank,
        )
        arrived = {expert: buffer for (of, expert), buffer in self._arrival_of.items() if of == row}
        buffer_of = held(layer, group) | arrived
        experts = slot_map.experts_of_rank(group.rank, group.size)
        return Placed(slot_map, [buffer_of[expert] if expert >= 0 else -1 for expert in experts])

    def commit(self) -> dict[int, Placed]:
        """The prepared placement serves from now on. Returns what it replaces, by layer."""
        replaced = {}
        for row, placed in self._placed.items():
            layer = self._layers[row]
            replaced[row] = Placed(layer.slot_map, layer.weight_buffers())
            layer.place(*placed)
        self.committed = True
        return replaced


def held(layer: MovableLayer, group: EPGroup) -> dict[int, int]:
    """expert -> weight buffer on this rank."""
    experts = layer.slot_map.experts_of_rank(group.rank, group.size)
    return {expert: buffer for expert, buffer in zip(experts, layer.weight_buffers()) if expert >= 0}


def check_round(plan: Round, layers: Sequence[MovableLayer], num_ranks: int, spare: int) -> None:
    """ValueError unless the round fits the placement that serves: every expert keeps a slot, and every expert that a
    rank shall hold is there already or is sent by one that holds it; and no rank gets more than `spare` at once."""
    sent = {(s.layer, s.expert, reader): s.source for wave in plan.waves for s in wave for reader in s.readers}
    wanted = set()
    for row, expert_of_slot_S in plan.rows.items():
        if not 0 <= row < len(layers):
            raise ValueError(f"layer {row} is not one of the {len(layers)} MoE layers")
        slot_map = layers[row].slot_map
        if len(expert_of_slot_S) != slot_map.num_slots:
            raise ValueError(f"layer {row} has {len(expert_of_slot_S)} slots, expected {slot_map.num_slots}")
        missing = set(range(slot_map.num_experts)) - set(expert_of_slot_S)
        strange = set(expert_of_slot_S) - set(range(-1, slot_map.num_experts))
        if missing or strange:
            what = f"expert {min(missing)} has no slot" if missing else f"there is no expert {min(strange)}"
            raise ValueError(f"layer {row}: {what}")
        old = slot_map.expert_of_slot_S.tolist()
        wanted |= {(row, expert, rank) for expert, rank in arrivals(old, expert_of_slot_S, num_ranks)}
    if wanted != set(sent):
        layer, expert, rank = min(wanted ^ set(sent))
        raise ValueError(f"layer {layer}: expert {expert} does not reach rank {rank} as planned")
    for rank in range(num_ranks):
        if (count := sum(reader == rank for _, _, reader in sent)) > spare:
            raise ValueError(f"rank {rank} is to receive {count} experts at once and has room for {spare}")
    for (layer, expert, _), source in sent.items():
        if expert not in layers[layer].slot_map.experts_of_rank(source, num_ranks):
            raise ValueError(f"layer {layer}: rank {source} is to send expert {expert}, which it does not hold")
    for wave in plan.waves:
        if not wave:
            raise ValueError("a wave is empty")
        busy = [s.source for s in wave], [reader for s in wave for reader in s.readers]
        if any(len(set(ranks)) < len(ranks) for ranks in busy):
            raise ValueError("a rank is to send, or to receive, two experts in one wave")
