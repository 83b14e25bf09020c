"""Rebalancer: the placement that serves, its load over time, and migrations to better ones.

Runs in the frontend's process, where it only counts, decides and instructs the ranks; plans are made in a process of
their own (eprt/balancer/job.py). docs/rebalancing.md has the whole protocol. Knows nothing of how ranks move experts.
"""

import asyncio
import contextlib
import logging
import os
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import msgspec
import numpy as np

from eprt.balancer import Placement
from eprt.balancer.controller import Controller, ServerSnapshot
from eprt.balancer.job import PlanAnswer, PlanRequest
from eprt.balancer.placement import even_nodes
from eprt.balancer.statistics import PHASES
from eprt.balancer.trigger import VERDICTS, Decision, TriggerConfig
from eprt.ep.migration.job import MigrationJob, MigrationStatus
from eprt.serve.errors import ApiError
from eprt.serve.options import ServeOptions
from eprt.serve.ranks.expert_load import expert_load, total_load
from eprt.serve.ranks.pool import RankPool
from eprt.serve.ranks.recovery import CapacityError
from eprt.serve.ranks.roster import NewView
from eprt.serve.rebalance.migration import Migration, placement_after, placement_without, with_a_commit
from eprt.serve.rebalance.planning import solve_apart
from eprt.serve.rebalance.request import RebalanceRequest, parse_rebalance
from eprt.serve.rebalance.routing_sample import RoutingSample, as_npz

_log = logging.getLogger(__name__)

SCHEMA = "eprt.rebalance/1"
_ENDED = ("done", "rolled_back", "refused")
_POLL_S = 0.05
_LARGEST_SHOWN = ("cap_bytes", "used_bytes", "buffer_bytes", "chunk_bytes", "max_work_s")  # of all ranks' statuses
_TRACE_TOKENS = 4096  # of each layer, that a plan is made for


class Rebalancer:
    """Balances the ranks of one pool."""

    def __init__(self, options: ServeOptions, pool: RankPool, rank_speeds: Callable[[], np.ndarray]):
        self._options, self._pool = options, pool
        self._rank_speeds = rank_speeds  # float [ranks]: the load that each can carry, by the diagnosis
        self.server_id = os.urandom(8).hex()
        self.controller = Controller()
        self._set_mode(options.rebalance)
        self.migration: Migration | None = None  # the latest
        self.decisions: deque[dict[str, Any]] = deque(maxlen=20)
        self.verdicts = dict.fromkeys(VERDICTS, 0)
        self.ended = {state: 0 for state in (*_ENDED, "lost")}
        self.moved = {"local": 0, "network": 0, "fan_out": 0}
        self._placement: Placement | None = None
        self._planning = asyncio.Lock()
        # A large model's statistics take milliseconds per window: they are updated in a thread, by one task at a time.
        self._using_statistics = asyncio.Lock()
        self._num_jobs = 0
        self._following: asyncio.Task | None = None

    def _set_mode(self, mode: str) -> None:
        """mode: "off" (moves only what is posted), "auto", or "dry-run" (also decides and logs, but moves no more)."""
        self.mode = mode
        self.controller.trigger.config = TriggerConfig(
            us_per_crossing=self._options.us_per_crossing, dry_run=mode == "dry-run"
        )
        self.controller.plan_again()

    # -- state --

    @property
    def placement(self) -> Placement:
        """The placement that serves. ApiError 503 while the model loads, 409 for a model without experts."""
        infos = self._pool.infos
        if not infos:
            self._pool.check_open()
        if not infos or not infos[0].moe_layers:
            raise ApiError(409, "this model has no MoE layers", code="no_experts")
        if self._placement is None:
            rows = [[e for info in infos for e in info.expert_of_slot[row]] for row in range(len(infos[0].moe_layers))]
            self._placement = Placement(np.array(rows), len(infos), even_nodes(infos[0].node_of_rank))
        return self._placement

    def statuses(self) -> list[MigrationStatus]:
        """Every rank's latest, none where experts cannot move."""
        return [s.migration for s in self._pool.stats if s.migration is not None]

    def placement_document(self) -> dict[str, Any]:
        """A placement file, with the epoch and the model's layers."""
        placement = self.placement
        return {
            **placement.to_json(),
            "num_ranks": placement.num_gpus,
            "num_experts": placement.num_experts,
            "layers": self._pool.infos[0].moe_layers,
        }

    def load_document(self) -> dict[str, Any]:
        """eprt.load/1: counters since the start."""
        pool = self._pool
        ranks = [{k: v for k, v in msgspec.to_builtins(s).items() if k != "expert_tokens"} for s in pool.stats]
        return {
            "schema": "eprt.load/1",
            "server_id": self.server_id,
            "time_s": time.monotonic(),
            "num_ranks": pool.num_ranks,
            "num_experts": pool.infos[0].num_experts if pool.infos else 0,
            "expert_bytes": pool.infos[0].expert_bytes if pool.infos else 0,
            "ranks": ranks,
            "layers": expert_load(pool.infos, pool.stats),
            **self._work_counters(),
        }

    def _work_counters(self) -> dict[str, Any]:
        """Counters of all ranks together, as eprt.balancer.controller.ServerSnapshot has them."""
        statuses = self.statuses()
        ranks = [r for r in self._pool.ranks.values() if r.stats is not None and r.waits is not None]
        return {
            "num_steps": max((s.num_steps for s in self._pool.stats), default=0),
            "expert_us": sum(r.waits.compute_us for r in ranks if r.waits),
            "expert_rows": sum(sum(r.stats.slot_tokens) for r in ranks if r.stats),
            "copied_bytes": sum(s.sent_bytes + s.received_bytes for s in statuses),
            "copied_s": sum(s.work_s for s in statuses),
        }

    async def load_file(self) -> bytes:
        """.npz: load [windows, layers, experts], load_prefill and load_decode of the same shape, and a routing sample:
        topk_idx [layers, tokens, choices] and, each [layers, tokens], source_gpu (the token's rank), topk_window (the
        window in which the token was computed, -1: none of these) and topk_step (the step)."""
        num_layers, statistics = self.placement.num_layers, self.controller.statistics
        if not len(statistics):
            raise ApiError(409, "no window of load is complete yet; try again in a few seconds", code="no_load")
        sample = await self._routing_sample()
        async with self._using_statistics:  # all phases must have the same windows
            windows = await asyncio.to_thread(lambda: [statistics.windows(phase) for phase in (None, *PHASES)])
            window_T = statistics.window_of_steps(sample.topk_step[0])
        parts = dict(zip(("load", "load_prefill", "load_decode"), windows)) | vars(sample)
        parts["topk_window"] = np.tile(window_T, (num_layers, 1))
        return await asyncio.to_thread(as_npz, parts)

    async def _routing_sample(self) -> RoutingSample:
        """ApiError 503 where a rank takes too long to answer."""
        try:
            replies = await self._pool.ask_routing()
        except TimeoutError:
            message = "a rank has not sent its routing sample within 10 s: its steps take long; try again"
            raise ApiError(503, message, code="no_sample", retry_after_s=10) from None
        return await asyncio.to_thread(RoutingSample.from_replies, replies)

    def status(self) -> dict[str, Any]:
        """eprt.rebalance/1."""
        infos, statuses = self._pool.infos, self.statuses()
        statistics = self.controller.statistics
        return {
            "schema": SCHEMA,
            "server_id": self.server_id,
            "mode": self.mode,
            "state": "planning" if self._planning.locked() else "migrating" if self.is_migrating else "idle",
            "epoch": self.placement.epoch,
            "spare_experts": infos[0].spare_experts if infos else 0,
            **{name: max((getattr(s, name) for s in statuses), default=0) for name in _LARGEST_SHOWN},
            "windows": len(statistics.current_windows),
            "rank_speeds": None if self.controller.gpu_speed is None else self.controller.gpu_speed.tolist(),
            "load_changes": statistics.num_changes,
            "migration": None if self.migration is None else asdict(self.migration),
            "decisions": list(self.decisions),
        }

    @property
    def is_migrating(self) -> bool:
        return self.migration is not None and self.migration.state == "running"

    # -- requests --

    async def post(self, body: bytes) -> dict[str, Any]:
        """POST /v1/eprt/rebalance; returns status(). ApiError names the field, layer and value that is wrong."""
        self._pool.check_open()
        placement = self.placement
        request = parse_rebalance(body, placement)
        if request.mode is not None:
            if request.mode == "auto":
                self._check_room()
            self._set_mode(request.mode)
        elif request.cancel:
            if not self.is_migrating or self.migration is None:
                raise ApiError(409, "no migration is under way", code="no_migration", param="cancel")
            self._pool.cancel_migration(self.migration.job_id)
        else:
            await self._plan_and_move(request)
        return self.status()

    async def _plan_and_move(self, request: RebalanceRequest) -> None:
        if not request.dry_run:
            self._check_room()
        if self._planning.locked() or self.is_migrating:
            raise ApiError(409, "a migration is being planned or under way; follow it with GET", code="busy")
        async with self._planning:
            before = self.placement
            plan_request = await self._plan_request(request)
            if plan_request is None:
                message = "no load has been measured yet to plan for; post a placement, or wait"
                raise ApiError(409, message, code="no_load")
            answer = await solve_apart(plan_request)
            if request.target is None:
                await self._decide(answer, "posted")
        if not request.dry_run:
            self._start_migration(answer, before, request.rank_speeds)

    async def hand_over(self, rank: int) -> None:
        """Before a rank leaves: the others get what only it holds, as far as experts can move now. Never raises."""
        try:
            if (target := placement_without(self.placement, rank)) is not None:
                await self._plan_and_move(RebalanceRequest(target=target))
                await asyncio.wait({self._following} if self._following else ())
        except (ApiError, CapacityError, ValueError) as error:
            _log.info("rank %d leaves with experts that others must read: %s", rank, error)

    def _check_room(self) -> None:
        if not self._pool.roster.is_whole:
            message = "experts move when every rank takes part: GET /v1/eprt/ranks says which does not"
            raise ApiError(409, message, code="ranks_missing")
        if not self._pool.infos[0].spare_experts:
            message = "experts cannot move: the server was started with --spare-experts 0"
            raise ApiError(409, message, code="rebalancing_not_enabled")

    async def _plan_request(self, request: RebalanceRequest) -> PlanRequest | None:
        infos = self._pool.infos
        if request.target is not None:
            plan_request = PlanRequest(self.placement, request.target)
        else:
            trace = None
            if self.placement.num_nodes > 1:
                sample = await self._routing_sample()
                trace = await asyncio.to_thread(sample.trace, _TRACE_TOKENS)
            async with self._using_statistics:
                plan_request = self.controller.plan_request(self.placement, trace)
        if plan_request is None:
            return None
        moves = request.max_moves_per_layer or plan_request.max_moves_per_layer
        spare, nodes = infos[0].spare_experts, tuple(infos[0].node_of_rank)
        return replace(plan_request, node_of_gpu=nodes, spare=spare, max_moves_per_layer=moves)

    def _start_migration(
        self, answer: PlanAnswer, placement: Placement, rank_speeds: tuple[float, ...] | None = None
    ) -> None:
        """Sends the job to the ranks. A plan without changes is done at once. placement: that the plan was made for.
        rank_speeds: default those measured."""
        self._pool.check_open()  # it may have been stopped while the plan was made
        self._check_room()
        if placement is not self.placement:
            raise ApiError(409, "the ranks have changed while the plan was made: try again", code="busy")
        if rank_speeds and not answer.rounds and self._options.engine.replica_routing.startswith("batch"):
            answer = with_a_commit(answer, placement)  # batches are split by other speeds from then on
        self._num_jobs += 1
        self.migration = Migration(
            job_id=self._num_jobs,
            state="running" if answer.rounds else "done",
            reason="" if answer.rounds else "the placement serves already",
            from_epoch=placement.epoch,
            epoch=placement.epoch,
            num_rounds=len(answer.rounds),
            rounds_done=0,
            moves=answer.moves,
            plan_ms=answer.seconds * 1e3,
            started_s=time.time(),
        )
        if answer.rounds:
            measured = self.controller.gpu_speed
            speeds = rank_speeds or (() if measured is None else tuple(measured.tolist()))
            job = MigrationJob(
                self._num_jobs,
                placement.epoch,
                answer.rounds,
                answer.weights,
                speeds,
                timeout_s=self._options.migration_timeout_s,
            )
            self._pool.migrate(job)
            self._following = asyncio.get_running_loop().create_task(self._follow(job, answer.target))

    # -- background tasks --

    async def _follow(self, job: MigrationJob, target: Placement) -> None:
        """Updates self.migration until all ranks have reported how the job ended."""
        migration = self.migration
        assert migration is not None
        begun = time.monotonic()
        while True:
            await asyncio.sleep(_POLL_S)
            mine = [s for s in self.statuses() if s.job_id == job.job_id]
            migration.seconds = time.monotonic() - begun
            if self._pool.state == "lost":
                state, reason = "lost", self._pool.reason
                break
            if len(mine) < self._pool.num_ranks:
                continue
            migration.rounds_done = min(s.rounds_done for s in mine)
            if all(s.state in _ENDED for s in mine):
                state, reason = mine[0].state, mine[0].reason
                break
        self._placement = placement_after(self.placement, job, migration.rounds_done, target)
        self._end_migration(migration, state, reason)

    def enter_view(self, view: NewView) -> None:
        """The ranks serve another placement: one was lost, or has come. A migration that was under way has ended."""
        if not view.rows:
            return
        before, reason = self.placement, f"view {view.number} began"
        if not view.num_missing:  # else the next view has them all, soon
            self._placement = Placement(np.array(view.rows), before.num_gpus, before.num_nodes, view.placement_epoch)
        if view.returned:
            self.server_id = os.urandom(8).hex()  # a new process counts from 0: the load before is another history
        if self._following is not None and self.is_migrating and self.migration is not None:
            self._following.cancel()
            self._following = None
            self._end_migration(self.migration, "rolled_back", reason)

    def _end_migration(self, migration: Migration, state: str, reason: str) -> None:
        migration.state, migration.reason, migration.epoch = state, reason, self.placement.epoch
        self.ended[state] += 1
        if state == "done":
            for way, count in migration.moves.items():
                self.moved[way] += count
        self.controller.migration_ended(time.monotonic(), state == "done")

    async def run(self) -> None:
        """Reads the counters in every window; in modes auto and dry-run also plans. Never raises."""
        while True:
            await asyncio.sleep(self._options.load_window_s)
            try:
                await self._close_window()
            except ApiError as error:
                _log.warning("rebalance: %s", error.message)
            except Exception:
                _log.exception("rebalance: a defect; the placement stays as it is")

    async def _close_window(self) -> None:
        snapshot = self._snapshot()
        if snapshot is None or self._pool.state != "serving":
            return
        async with self._using_statistics:
            changed = await asyncio.to_thread(self.controller.observe, snapshot)
        if changed:
            _log.info("rebalance: the load has changed; earlier windows are dropped")
        if self._options.rebalance_slow_ranks and self.controller.set_speed(self._rank_speeds()):
            _log.info("rebalance: the ranks' speeds are now %s", np.round(self._rank_speeds(), 2).tolist())
        if not self._may_plan or not self.controller.due(time.monotonic()):
            return
        async with self._planning:
            before = self.placement
            request = await self._plan_request(RebalanceRequest())
            if request is None:
                return
            try:
                answer = await solve_apart(request)
            except ApiError:
                self.controller.plan_later(time.monotonic())
                raise
            if self.mode == "off":  # it was switched off meanwhile
                return
            decision = await self._decide(answer, self.mode)
        if decision.migrate:
            self._start_migration(answer, before)

    @property
    def _may_plan(self) -> bool:
        """Whether a plan may be made now that nobody has asked for."""
        has_room = self.mode == "dry-run" or self._pool.infos[0].spare_experts > 0
        wanted = self.mode != "off" and has_room and self._pool.num_ranks > 1 and self._pool.roster.is_whole
        return wanted and not self._planning.locked() and not self.is_migrating

    def _snapshot(self) -> ServerSnapshot | None:
        total_PLE = total_load(self._pool.infos, self._pool.stats)
        if total_PLE is None:
            return None
        expert_bytes = self._pool.infos[0].expert_bytes
        counters = self._work_counters()
        return ServerSnapshot(self.server_id, time.monotonic(), total_PLE, expert_bytes=expert_bytes, **counters)

    async def _decide(self, answer: PlanAnswer, asked_by: str) -> Decision:
        async with self._using_statistics:
            decision = await asyncio.to_thread(self.controller.decide, time.monotonic(), self.placement, answer)
        self.verdicts[decision.verdict] += 1
        self.decisions.append({"time_s": time.time(), "asked_by": asked_by, **decision.to_json()})
        return decision

    async def close(self) -> None:
        """The server stops: a migration under way is rolled back, so that the ranks need not wait for its end."""
        if self.is_migrating and self.migration is not None:
            self._pool.cancel_migration(self.migration.job_id)
        if self._following is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._following, 2.0)
