"""Migrator: one rank's part in moving experts while they serve. docs/rebalancing.md has the state machine.

Every step of the engine calls work() before the ranks exchange their headers and advance() with everyone's after it.
All decisions follow from the exchanged numbers alone, so all ranks take them in the same step:

    offered   a job begins when every rank shows its number: all have been told
    progress  ticks this rank has ended; the next tick begins when all have. Negative: this rank cannot go on, all roll
              back

A round (balancer/migration.py) takes one tick per chunk and one more for taking in the last. Then its layers' slot maps
change on all ranks in the same step: the commit. What it replaced is kept for one tick more, until all are known to
have committed, and is then free for the next round.
"""

import logging
import time
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from eprt.balancer.migration import Round, Stream, arrivals
from eprt.ep.group import EPGroup
from eprt.ep.migration_job import CANCELLED, DAMAGED, FAILURES, LATE, Job, MigrationStatus
from eprt.ep.placement import SlotMap
from eprt.ep.transport import Transport, cut

_log = logging.getLogger(__name__)


class Pool(Protocol):
    """Memory for experts: see layers/experts.py ExpertPool."""

    @property
    def expert_bytes(self) -> int: ...
    def take(self) -> int: ...
    def give_back(self, storage: int) -> None: ...
    def memory(self, storage: int) -> list[np.ndarray]: ...


class MovableLayer(Protocol):
    """A layer whose experts can move: see layers/moe.py EPMoE."""

    slot_map: SlotMap

    @property
    def pool(self) -> Pool: ...
    def storages(self) -> list[int]:
        """Where each local slot's expert lies, -1 for none."""
        ...

    def place(self, slot_map: SlotMap, storages: Sequence[int]) -> None:
        """From now on the slots hold what slot_map says, in these storages."""
        ...


class Migrator:
    """layers: the placement's rows, in order. spare: experts the layers' pools have room for beyond all slots; no round
    may bring a rank more. routing: "weights" or "local", see EngineConfig.replica_routing."""

    def __init__(
        self,
        group: EPGroup,
        layers: Sequence[MovableLayer],
        transport: Transport,
        spare: int = 2,
        routing: str = "weights",
    ):
        self._group, self._layers, self._transport, self._spare = group, list(layers), transport, spare
        self._node_of_rank = group.node_of_rank if routing == "local" else None
        self._offer: Job | None = None
        self._job: Job | None = None
        self._round: _Round | None = None
        self._last_job_id = 0
        self._cancelled_id = 0
        self._epoch = 0
        self._tick = self._progress = 0
        self._undo: list[tuple[int, SlotMap, list[int]]] = []  # the latest commit, until all are known to have made it
        self._outcome = ("idle", "")
        self._rounds_done = self._num_rounds = 0
        self._sent = self._received = self._used = 0
        self._work_s = self._max_work_s = 0.0

    @property
    def active(self) -> bool:
        """Whether a job is offered or under way: the ranks must go on stepping."""
        return self._job is not None or self._offer is not None

    @property
    def epoch(self) -> int:
        """Of the placement that serves: counts the commits."""
        return self._epoch

    @property
    def rows(self) -> list[list[int]]:
        """The placement that serves, one row per layer."""
        return [layer.slot_map.expert_of_slot_S.tolist() for layer in self._layers]

    def offer(self, job: Job) -> None:
        """This rank has been told of the job. Raises RuntimeError while another is under way."""
        if self.active:
            current = self._job or self._offer
            assert current is not None
            raise RuntimeError(f"migration {current.job_id} is under way; wait for its end before {job.job_id}")
        self._offer = job

    def cancel(self, job_id: int) -> None:
        """This rank wants the job rolled back; one rank is enough. Nothing if it has ended."""
        self._cancelled_id = job_id

    def status(self) -> MigrationStatus:
        expert_bytes = sum({id(layer.pool): layer.pool.expert_bytes for layer in self._layers}.values())
        state, reason = self._outcome
        return MigrationStatus(
            job_id=self._last_job_id,
            state=state,
            reason=reason,
            epoch=self._epoch,
            rounds_done=self._rounds_done,
            num_rounds=self._num_rounds,
            sent_bytes=self._sent,
            received_bytes=self._received,
            work_s=self._work_s,
            max_work_s=self._max_work_s,
            buffer_bytes=self._spare * expert_bytes + self._transport.buffer_bytes,
            used_bytes=self._used,
        )

    # -- in every step --

    def work(self) -> tuple[int, int]:
        """(offered, progress) for this step's header, after the part of the work that belongs between two steps."""
        if self._job is None:
            # Messages of a migration that was rolled back must be gone before the next begins.
            can_begin = self._offer is not None and self._transport.settle()
            return (self._offer.job_id if self._offer is not None and can_begin else 0), 0
        if self._progress >= 0:
            start_s = time.perf_counter()
            self._progress = self._run_tick(start_s)
            spent_s = time.perf_counter() - start_s
            self._work_s += spent_s
            self._max_work_s = max(self._max_work_s, spent_s)
        return self._job.job_id, self._progress

    def advance(self, offered_N: Sequence[int], progress_N: Sequence[int]) -> None:
        """Takes the ranks' next common step; the arguments are what work() returned on each of them."""
        if self._job is None:
            if self._offer is not None and min(offered_N) == self._offer.job_id:
                self._begin(self._offer)
        elif min(progress_N) < 0:
            failed = min(range(len(progress_N)), key=progress_N.__getitem__)
            self._end("rolled_back", f"{FAILURES[progress_N[failed]]}, says rank {failed}")
        elif min(progress_N) == self._tick:
            self._end_tick()

    def abort(self, reason: str) -> None:
        """The ranks can no longer agree (one was lost): back to the placement that all are known to have had."""
        for row, slot_map, storages in self._undo:
            layer = self._layers[row]
            for storage in set(layer.storages()) - set(storages) - {-1}:
                layer.pool.give_back(storage)
            layer.place(slot_map, storages)
        self._epoch -= bool(self._undo)
        self._undo.clear()
        if self._round is not None and not self._round.committed:
            self._round.release()
        if self._job is not None:
            self._outcome = ("rolled_back", reason)
        self._round = self._job = self._offer = None

    def close(self) -> None:
        """Frees the transport. Collective while all ranks live; never hangs when some do not."""
        self._transport.close()

    # -- a job --

    def _begin(self, job: Job) -> None:
        self._job, self._offer, self._last_job_id = job, None, job.job_id
        self._tick = self._progress = 0
        self._rounds_done, self._num_rounds = 0, len(job.rounds)
        self._outcome = ("running", "")
        if job.epoch != self._epoch:
            self._end("refused", f"it starts from placement {job.epoch}, but {self._epoch} serves")
        else:
            self._begin_round()

    def _begin_round(self) -> None:
        """All ranks see the same job and placement, so all refuse it, or none."""
        assert self._job is not None
        self._round = None
        if self._rounds_done == len(self._job.rounds):
            self._end("done", "")
            return
        plan = self._job.rounds[self._rounds_done]
        try:
            check_round(plan, self._layers, self._group.size, self._spare)
        except ValueError as error:
            self._end("refused", f"round {self._rounds_done}: {error}")
            return
        self._round = _Round(plan, self._layers, self._group.rank, self._job)
        self._used = max(self._used, self._round.arriving_bytes)
        self._tick += 1

    def _run_tick(self, now_s: float) -> int:
        """This rank's work of the current tick; returns the progress to show."""
        assert self._job is not None and self._round is not None
        one, transport = self._round, self._transport
        if one.started_s is None:
            one.started_s = now_s
        if not one.committed:
            # First of all, and once in every tick: nobody waits for a message that was never sent.
            if one.worked_tick < self._tick:
                one.worked_tick = self._tick
                if not self._move(one):
                    return DAMAGED
            if self._cancelled_id == self._job.job_id:
                return CANCELLED
        if not transport.is_done():
            late = now_s - one.started_s > self._job.timeout_s
            return LATE if late else self._progress
        return self._tick

    def _move(self, one: "_Round") -> bool:
        """Sends this tick's chunk and takes in the one before. False if that one is damaged."""
        transport, sound = self._transport, True
        for stream, storage, start, num_bytes in one.chunks(one.tick):
            tag = _tag(self._last_job_id, self._tick)
            if stream.source == self._group.rank:
                transport.send(self._tick, tag, stream, cut(one.memory(stream, storage), start, num_bytes))
                self._sent += num_bytes
            else:
                transport.expect(self._tick, tag, stream, num_bytes)
        for stream, storage, start, num_bytes in one.chunks(one.tick - 1):
            if stream.source != self._group.rank:
                tag = _tag(self._last_job_id, self._tick - 1)
                parts = cut(one.memory(stream, storage), start, num_bytes)
                sound &= transport.take(self._tick - 1, tag, stream, parts)
                self._received += num_bytes
        one.tick += 1
        return sound

    def _end_tick(self) -> None:
        """Every rank has done its part of the tick."""
        one = self._round
        assert one is not None
        if one.committed:
            self._forget_old()
            self._rounds_done += 1
            self._begin_round()
            return
        if one.tick > one.num_ticks:
            self._commit(one)
        self._tick += 1

    def _commit(self, one: "_Round") -> None:
        assert self._job is not None
        is_last = {row: k for k, r in enumerate(self._job.rounds) for row in r.rows}
        for row, expert_of_slot_S in one.plan.rows.items():
            layer = self._layers[row]
            self._undo.append((row, layer.slot_map, layer.storages()))
            weight_S = self._job.weights.get(row) if is_last[row] == self._rounds_done else None
            slot_map = SlotMap.of_row(
                np.array(expert_of_slot_S),
                layer.slot_map.num_experts,
                weight_S=None if weight_S is None else np.array(weight_S),
                rank=self._group.rank,
                node_of_rank=self._node_of_rank,
            )
            held = _held(layer, self._group) | one.arrived(row)
            experts = slot_map.experts_of_rank(self._group.rank, self._group.size)
            layer.place(slot_map, [held[expert] if expert >= 0 else -1 for expert in experts])
        one.committed = True
        self._epoch += 1

    def _forget_old(self) -> None:
        """All ranks have committed: the storages that no slot uses any more are free."""
        for row, _, storages in self._undo:
            layer = self._layers[row]
            for storage in set(storages) - set(layer.storages()) - {-1}:
                layer.pool.give_back(storage)
        self._undo.clear()

    def _end(self, state: str, reason: str) -> None:
        assert self._job is not None
        if self._round is not None and not self._round.committed:
            self._round.release()
        elif self._round is not None:
            self._forget_old()  # committed by all; what failed came after
            self._rounds_done += 1
        self._outcome = (state, reason)
        level = logging.INFO if self._group.rank == 0 else logging.DEBUG
        _log.log(
            level,
            "migration %d %s after %d of %d rounds, placement %d serves%s",
            self._job.job_id,
            state,
            self._rounds_done,
            self._num_rounds,
            self._epoch,
            f": {reason}" if reason else "",
        )
        self._job = self._round = None


class _Round:
    """One round on this rank: where its arrivals go, and which chunk is due when."""

    def __init__(self, plan: Round, layers: Sequence[MovableLayer], rank: int, job: Job):
        self.plan, self._layers, self._rank, self._chunk_bytes = plan, layers, rank, job.chunk_bytes
        self.tick, self.worked_tick = 0, 0
        self.started_s: float | None = None
        self.committed = False
        self._mine = [[s for s in wave if rank == s.source or rank in s.readers] for wave in plan.waves]
        self._waves = [max(-(-self._bytes(s) // job.chunk_bytes) for s in wave) for wave in plan.waves]
        self.num_ticks = sum(self._waves)
        self._arriving = {
            (s.layer, s.expert): layers[s.layer].pool.take() for wave in self._mine for s in wave if rank in s.readers
        }
        self.arriving_bytes = sum(layers[layer].pool.expert_bytes for layer, _ in self._arriving)

    def _bytes(self, stream: Stream) -> int:
        return self._layers[stream.layer].pool.expert_bytes

    def chunks(self, tick: int) -> list[tuple[Stream, int, int, int]]:
        """(stream, storage, first byte, bytes) of this rank's chunks of a tick; at most one to send, one to take in."""
        if not 0 <= tick < self.num_ticks:
            return []
        wave = 0
        while tick >= self._waves[wave]:
            tick -= self._waves[wave]
            wave += 1
        start = tick * self._chunk_bytes
        return [
            (s, self._storage(s), start, min(self._chunk_bytes, self._bytes(s) - start))
            for s in self._mine[wave]
            if start < self._bytes(s)
        ]

    def _storage(self, stream: Stream) -> int:
        if stream.source != self._rank:
            return self._arriving[stream.layer, stream.expert]
        layer = self._layers[stream.layer]
        per_rank = len(layer.storages())
        experts = layer.slot_map.expert_of_slot_S[self._rank * per_rank : (self._rank + 1) * per_rank].tolist()
        return layer.storages()[experts.index(stream.expert)]

    def memory(self, stream: Stream, storage: int) -> list[np.ndarray]:
        return self._layers[stream.layer].pool.memory(storage)

    def arrived(self, row: int) -> dict[int, int]:
        """expert -> storage of what came for a layer."""
        return {expert: storage for (layer, expert), storage in self._arriving.items() if layer == row}

    def release(self) -> None:
        """Gives back what would have held the arrivals."""
        for (layer, _), storage in self._arriving.items():
            self._layers[layer].pool.give_back(storage)


def _held(layer: MovableLayer, group: EPGroup) -> dict[int, int]:
    """expert -> storage on this rank."""
    experts = layer.slot_map.experts_of_rank(group.rank, group.size)
    return {expert: storage for expert, storage in zip(experts, layer.storages()) if expert >= 0}


def _tag(job_id: int, tick: int) -> int:
    return (job_id << 32) + tick


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
            raise ValueError(f"rank {rank} is to take in {count} experts at once and has room for {spare}")
    for (layer, expert, _), source in sent.items():
        if expert not in layers[layer].slot_map.experts_of_rank(source, num_ranks):
            raise ValueError(f"layer {layer}: rank {source} is to send expert {expert}, which it does not hold")
