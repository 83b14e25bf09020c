"""Fleet: several instances behind one HTTP port, as HTTP and the frontend see them: as one pool.

An instance appears when the first of its ranks says Hello, serves when all have loaded, and is lost with its first
rank; its sequences go on elsewhere (handoffs.py), and a successor may take its name. Knows nothing of HTTP, nor of who
gets a request (chooser.py).
"""

import asyncio
import logging
import random
import socket
from collections.abc import Callable, Sequence
from dataclasses import replace

import msgspec

from eprt import env
from eprt.engine.outputs import EngineStats
from eprt.engine.request import QueueFullError, RequestLimits
from eprt.serve.errors import ApiError, print_line, unavailable
from eprt.serve.instances.chooser import Chooser
from eprt.serve.instances.far_joins import NEEDED, FarJoinAnswer, FarJoinRequest, FarJoins
from eprt.serve.instances.handoffs import Handoffs
from eprt.serve.instances.instance import Instance, fleet_loading_reason
from eprt.serve.instances.standstill import Standstill
from eprt.serve.instances.starter import InstanceStarter
from eprt.serve.options import ROLES, FrontendConfig, InstanceName
from eprt.serve.ranks import messages as msg
from eprt.serve.ranks.connection import RankConnection
from eprt.serve.ranks.generation import Generation
from eprt.serve.ranks.pool import Prompt, RankPool, begin_service
from eprt.serve.ranks.rank import Rank
from eprt.serve.ranks.request_metrics import RequestMetrics
from eprt.serve.tiers.tier import Tier

_log = logging.getLogger(__name__)

_LOOK_S = 0.1  # between two looks for pages that are held for too long, and for processes that stand still


class Fleet:
    """All instances of one server. on_drain(reason, rank) is called when a rank was told to stop."""

    def __init__(self, config: FrontendConfig, metrics: RequestMetrics, on_drain: Callable[[str, int], None]):
        self._config, self._options, self.metrics = config, config.options, metrics
        self.num_ranks, self.stall_s = config.num_ranks, 2 * env.get("EPRT_TIMEOUT_S")
        self.state, self.reason = "loading", "the model is loading"
        self.limits: RequestLimits | None = None  # once all instances of the start have loaded
        self.ready, self.ended = asyncio.Event(), asyncio.Event()
        self.instances: dict[str, Instance] = {}  # the latest of each name, in the order of the flags
        self.num_lost = 0
        self.on_instance: list[Callable[[Instance], None]] = []  # called with each new one
        self.starter: InstanceStarter | None = None  # of further instances; None: nobody starts any
        self.far_joins: FarJoins | None = None  # of instances of other hosts; None: none can come
        self.scale_document: Callable[[], dict[str, object]] | None = None  # what the planner says; None: there is none
        self.on_left: list[Callable[[Instance], None]] = []  # with each that has left
        # Called with the instance that begins a request, and its predicted time to first token: now, and if it were
        # alone there.
        self.on_prediction: Callable[[Instance, float, float], None] = lambda instance, now_s, alone_s: None
        self.chooser = Chooser(lambda: self.living, config.options)
        self.handoffs = Handoffs(self.chooser, config.options.handoff_timeout_s, config.options.engine.max_running)
        self._on_drain = on_drain
        self._instance_of: dict[int, Instance] = {}  # by id() of a Rank that is connected
        self._num_made = 0
        self._standstill = Standstill()
        self._retiring: dict[str, asyncio.Task] = {}  # by instance
        self._seeds = random.Random(config.options.engine.seed)
        self._first_rank, first = {}, 0
        for name, _, num_ranks in config.options.instance_plan:
            self._first_rank[name], first = first, first + num_ranks

    async def listen(self) -> None:
        """Starts taking the ranks' connections."""
        listener = socket.socket(fileno=self._config.listener_fd)
        loop = asyncio.get_running_loop()
        self._listening = [await loop.create_server(lambda: RankConnection(self), sock=listener)]
        if self.far_joins is not None:
            sock = self.far_joins.sock
            self._listening.append(await loop.create_server(lambda: RankConnection(self), sock=sock))

    async def watch(self) -> None:
        """Ends only by cancellation."""
        while True:
            await asyncio.sleep(_LOOK_S)
            self.handoffs.give_up_late()
            self._standstill.look(self.living)
            for instance in list(self.instances.values()):
                instance.pool.look_at_loading()
            if self.starter is not None:
                self.starter.drop_failed()

    # -- for the API --

    @property
    def living(self) -> list[Instance]:
        return [instance for instance in self.instances.values() if instance.lives]

    @property
    def num_sequences(self) -> int:
        return sum(instance.pool.num_sequences for instance in self.living)

    @property
    def max_sequences(self) -> int:
        """Of one request."""
        plan, engine = self._options.instance_plan, self._options.engine
        return min(num_ranks for _, _, num_ranks in plan) * (engine.max_running + engine.max_queue)

    @property
    def ranks(self) -> dict[int, Rank]:
        """The latest of each number, over all instances."""
        there = self.instances.values()
        return {one.first_rank + rank: each for one in there for rank, each in one.pool.ranks.items()}

    @property
    def stats(self) -> list[EngineStats]:
        """Every living rank's latest, with its number over all instances."""
        return [replace(s, rank=one.first_rank + s.rank) for one in self.living for s in one.pool.stats]

    @property
    def members(self) -> list[Rank]:
        return [rank for instance in self.living for rank in instance.pool.members]

    def stalled_ranks(self) -> list[Rank]:
        return [rank for instance in self.living for rank in instance.pool.stalled_ranks()]

    def check_open(self) -> None:
        """Raises ApiError 503 unless new requests are taken."""
        if self.state != "serving":
            retry = 5 if self.state == "loading" else None
            raise unavailable(f"no new requests: {self.reason}", code=self.state, retry_after_s=retry)

    def submit(self, prompts: Sequence[Prompt], cache_key: str | None = None, tier: Tier | None = None) -> Generation:
        """As RankPool.submit."""
        self.check_open()
        generation = Generation(self.abort, begin_service(tier, prompts, self.metrics))
        begun = []
        try:
            for token_ids, params in prompts:
                params = replace(params, seed=self._seeds.getrandbits(63)) if params.seed is None else params
                chosen = self.chooser.choose_any(token_ids, cache_key, tier)
                if chosen is None:
                    raise QueueFullError("no instance is left")
                instance, hands_over = chosen
                if tier is not None:
                    self.chooser.check_tier(tier, instance, token_ids, cache_key)
                rank, charged, uncached = instance.pool.router.predict(token_ids, cache_key, tier.rank if tier else 0)
                self.on_prediction(instance, *instance.forecast.first_token_times(rank, tier, uncached))
                sequences = instance.pool.sequences
                adds = sequences.start(generation, [(token_ids, params)], cache_key, hands_over)
                begun.append((instance, adds, charged + uncached))
        except (QueueFullError, ApiError) as error:
            for instance, adds, _ in begun:
                for _, add in adds:
                    instance.pool.sequences.take_out(add.request_id)
            if tier is not None:
                self.metrics.tiers.count_request(tier, "refused")
            if isinstance(error, ApiError):
                raise
            message = f"the queue is full: {self.num_sequences} sequences run or wait"
            retry_s = self.metrics.seconds_until_room()
            raise ApiError(429, message, code="queue_full", kind="rate_limit_error", retry_after_s=retry_s) from None
        for instance, adds, num_ahead in begun:
            if (first := instance.pool.sequences.find(adds[0][1].request_id)) is not None:
                first.num_ahead = num_ahead
            instance.pool.send_numbered(adds)
        return generation

    def abort(self, request_id: str, reason: str = "abort") -> None:
        """Ends a sequence, wherever it is. reason: for the metrics."""
        self.handoffs.drop_offer(request_id)
        for instance in self.living:
            if instance.pool.sequences.find(request_id) is not None:
                instance.pool.abort(request_id, reason)

    # -- from the ranks --

    def on_hello(self, hello: msg.Hello, transport: asyncio.Transport) -> Rank | None:
        instance = self._find_instance(hello)
        if instance is None:
            _log.warning("refused a connection that claims to be rank %s of %s", hello.rank, hello.instance)
            transport.abort()
            return None
        rank = instance.pool.on_hello(hello, transport)
        if rank is not None:
            self._instance_of[id(rank)] = instance
            if rank.is_far:
                rank.notice_dead_host()
            else:
                rank.watch_process()
        return rank

    def _find_instance(self, hello: msg.Hello) -> Instance | None:
        """The instance of a rank, a new one for the first rank of an incarnation."""
        name = hello.instance
        if name is None or not hello.has_token(self._config.token) or name.role not in ROLES:
            return None
        latest = self.instances.get(name.name)
        if latest is None or (latest.state == "lost" and latest.name.incarnation != name.incarnation):
            latest = self._make_instance(name)
            instances = self.instances | {name.name: latest}
            self.instances = dict(sorted(instances.items(), key=lambda each: each[1].first_rank))
        return latest if latest.name.incarnation == name.incarnation and latest.state != "lost" else None

    def _make_instance(self, name: InstanceName) -> Instance:
        self._num_made += 1
        is_of_start = name.name in self._first_rank
        if not is_of_start:
            self._first_rank[name.name], self.num_ranks = self.num_ranks, self.num_ranks + name.num_ranks
        first_rank = self._first_rank[name.name]
        config = msgspec.structs.replace(self._config, num_ranks=name.num_ranks)
        on_drain = self._on_drain if is_of_start else lambda reason, rank: self._leave(name.name, reason)
        pool = RankPool(config, self.metrics, on_drain, f"{self._num_made}:", first_rank)
        pool.name = f"{name.name}, "
        pool.handoffs = self
        instance = Instance(name, pool, first_rank)
        if self.starter is not None:
            self.starter.on_hello(name.name, name.role, [each for each, _, _ in self._options.instance_plan])
        for listener in self.on_instance:
            listener(instance)
        return instance

    def on_message(self, rank: Rank, message: msg.ToFrontend) -> None:
        instance = self._instance_of[id(rank)]
        instance.pool.on_message(rank, message)
        if isinstance(message, msg.Ready) and instance.pool.ready.is_set() and instance.state == "loading":
            self._on_loaded(instance)
        elif isinstance(message, msg.Bye) and instance.pool.ended.is_set():
            self._on_left(instance)
        if self.state == "loading":
            self.reason = fleet_loading_reason(self.instances.values())

    def on_closed(self, rank: Rank | None, is_rank0: bool) -> None:
        if rank is not None:
            self._instance_of.pop(id(rank)).pool.on_closed(rank, is_rank0)
            rank.forget_process()
            self._standstill.forget(rank)

    def on_handoff(self, pool: RankPool, rank: Rank, message: msg.Held | msg.Arrived) -> None:
        instance = self._instance_of[id(rank)]
        if isinstance(message, msg.Held):
            self.handoffs.on_held(instance, rank, message)
        else:
            self.handoffs.on_arrived(instance, message)

    def _on_loaded(self, instance: Instance) -> None:
        if why := self._why_refused(instance):
            instance.pool.lose(f"instance {instance}", "was refused", why)
            return
        instance.set_state("ready")
        if self.ready.is_set():
            _log.info("instance %s takes part", instance)
        elif len(self.living) >= self._options.num_instances:
            infos = [info for one in self.living for info in one.pool.infos]
            kv_tokens = min(info.kv_tokens for info in infos)
            max_model_len = min(info.max_model_len for info in infos)
            self.limits = RequestLimits(infos[0].vocab_size, max_model_len, kv_tokens)
            if self.state == "loading":
                self.set_state("serving", "")
            self.ready.set()

    def _why_refused(self, instance: Instance) -> str:
        """What of the instance is other than of those that serve, "" for nothing."""
        others = [one for one in self.living if one is not instance]
        terms = [one.pool.infos[0].terms for one in (instance, *others[:1])]
        if None in terms:
            return "its pages cannot be read by others"
        mine, theirs = (msgspec.structs.asdict(each) for each in (terms[0], terms[-1]))  # type: ignore[arg-type]
        for field in mine:
            if mine[field] != theirs[field]:
                return f"its {field.replace('_', ' ')} is {mine[field]}, that of the others {theirs[field]}"
        return ""

    def rescue_sequences(self, pool: RankPool) -> int:
        """An instance is lost: its sequences go on elsewhere."""
        (instance,) = [one for one in self.instances.values() if one.pool is pool]
        instance.set_state("lost")
        if not self.ready.is_set() or self.state in ("stopping", "lost"):
            asyncio.get_running_loop().call_soon(self._lose_all, instance)
            return 0
        self.num_lost += 1
        num_moved = self.handoffs.move_from(instance)
        self._forget_pages(pool)
        loop = asyncio.get_running_loop()
        for rank in pool.ranks.values():  # the others of the instance leave
            loop.call_soon(rank.transport.close)
        if not self.living:
            loop.call_soon(self._lose_all, instance)
        return num_moved

    def _lose_all(self, instance: Instance) -> None:
        if not self.ended.is_set():
            self.set_state("lost", instance.pool.reason)
            self.ended.set()

    # -- coming and leaving --

    async def start_instance(self, role: str, num_ranks: int | None = None) -> None:
        """Has one more instance started. num_ranks: None for as many as others of the role have. ApiError says why
        none comes."""
        self.check_open()
        if self.starter is None:
            raise ApiError(500, f"no {role} instance was started: nobody here can", code="start_failed")
        await self.starter.start(role, num_ranks)

    async def invite(self, request: FarJoinRequest) -> FarJoinAnswer:
        """An instance of another host, which wants to join. ApiError says why it cannot."""
        self.check_open()
        if self.far_joins is None:
            raise ApiError(409, NEEDED, code="not_here")
        return await self.far_joins.invite(request, self.instances)

    def retire_instance(self, name: str) -> None:
        """Lets an instance leave once its requests have ended, or after the drain's time, moved. ApiError says why
        not."""
        self.check_open()
        instance = self.instances.get(name)
        if instance is None:
            raise ApiError(404, f"instance {name}: there are {', '.join(self.instances)}", code="not_found")
        if instance.state != "ready":
            message = f"instance {name} is {instance.state}: only a ready instance retires"
            raise ApiError(409, message, code="not_ready")
        if not any(one.is_open for one in self.living if one is not instance):
            raise ApiError(409, f"instance {name} cannot retire: no other instance is ready", code="capacity")
        self._retire(instance)

    def _retire(self, instance: Instance) -> None:
        instance.set_state("draining")
        self._retiring[str(instance)] = asyncio.get_running_loop().create_task(self._empty_and_stop(instance))

    def _leave(self, name: str, reason: str) -> None:
        """A rank of an instance of another shell was told to stop."""
        instance = self.instances.get(name)
        if instance is not None and instance.is_open:
            _log.info("instance %s: %s", instance, reason)
            self._retire(instance)

    async def _empty_and_stop(self, instance: Instance) -> None:
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + self._options.drain_timeout_s
        while self._is_needed(instance) and loop.time() < deadline_s:
            await asyncio.sleep(0.05)
        if instance.state == "draining" and self.state == "serving":
            self.handoffs.move_from(instance)
            instance.pool.stop()

    def _is_needed(self, instance: Instance) -> bool:
        """Whether it has requests, or pages that are being read."""
        holds = any(offer.source is instance for offer in self.handoffs.offers.values())
        return instance.state == "draining" and (holds or instance.pool.num_sequences > 0)

    def _on_left(self, instance: Instance) -> None:
        """All its ranks have said Bye."""
        if self.state == "stopping":
            self._check_ended()
        elif instance.state == "draining":
            del self.instances[str(instance)]
            self._retiring.pop(str(instance), None)
            self._forget_pages(instance.pool)
            for listener in self.on_left:
                listener(instance)
            _log.info("instance %s has left", instance)

    def _forget_pages(self, pool: RankPool) -> None:
        for info in pool.infos:
            for member in self.members:
                member.send(msg.ForgetSource(info.page_owner))

    # -- for the frontend's life --

    def set_state(self, state: str, reason: str) -> None:
        self.state, self.reason = state, reason

    async def wait_quiet(self) -> None:
        """Until no sequence runs."""
        while self.num_sequences:
            await asyncio.gather(*(one.pool.quiet.wait() for one in self.living))

    def end_sequences(self) -> int:
        """As RankPool.end_sequences."""
        for request_id in list(self.handoffs.offers):
            self.handoffs.drop_offer(request_id)
        return sum(instance.pool.end_sequences() for instance in self.living)

    def stop(self) -> None:
        """Tells all ranks to leave. `ended` is set when they have."""
        self.set_state("stopping", "the server is stopping")
        for instance in self.living:
            instance.pool.stop()
        self._check_ended()

    def _check_ended(self) -> None:
        if self.state == "stopping" and all(one.pool.ended.is_set() for one in self.living):
            self.ended.set()

    def lose(self, who: str, what: str) -> None:
        """The ranks cannot go on, as RankPool.lose."""
        print_line(f"eprt: {who} {what}")
        self.set_state("lost", f"{who} {what}")
        self.ended.set()
