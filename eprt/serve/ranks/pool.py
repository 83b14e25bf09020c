"""RankPool: the ranks as the frontend sees them. Hands out sequences, brings back tokens, notices ranks that are gone.

Every sequence ends in exactly one of: a last TokenOutput, an abort by its owner, or the error of the whole pool. Where
ranks may be lost (--max-lost-ranks), a lost rank's sequences go on elsewhere, and a process may take its slot.
Knows nothing of HTTP or of text.
"""

import asyncio
import logging
import socket
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from eprt import env
from eprt.engine.outputs import EngineStats
from eprt.engine.request import QueueFullError, RequestLimits
from eprt.engine.router import Router
from eprt.engine.sampling_params import SamplingParams
from eprt.ep.migration.job import MigrationJob
from eprt.serve.errors import ApiError, print_line, unavailable
from eprt.serve.options import FrontendConfig
from eprt.serve.ranks import messages as msg
from eprt.serve.ranks.connection import RankConnection
from eprt.serve.ranks.elasticity import Elasticity
from eprt.serve.ranks.generation import Generation
from eprt.serve.ranks.loading import loading_reason
from eprt.serve.ranks.loading_watch import LoadingWatch
from eprt.serve.ranks.rank import Rank
from eprt.serve.ranks.request_metrics import RequestMetrics
from eprt.serve.ranks.roster import Roster
from eprt.serve.ranks.sequences import Add, Sequences
from eprt.serve.tiers.forecast import Forecast, check_step
from eprt.serve.tiers.metrics import RequestService
from eprt.serve.tiers.tier import Tier

_log = logging.getLogger(__name__)


Prompt = tuple[list[int], SamplingParams]  # token ids, and how its sequences go on


def begin_service(tier: Tier | None, prompts: Sequence[Prompt], metrics: RequestMetrics) -> RequestService | None:
    """Of a new request; None on a server without tiers."""
    return None if tier is None else RequestService(tier, sum(params.n for _, params in prompts), metrics.tiers)


class HandoffEvents(Protocol):
    """Who moves sequences between the pools of several instances."""

    def on_handoff(self, pool: "RankPool", rank: Rank, message: msg.Held | msg.Arrived) -> None: ...

    def rescue_sequences(self, pool: "RankPool") -> int:
        """The pool is lost: takes its sequences elsewhere, as far as there is anywhere, and says how many."""
        ...


class RankPool:
    """All ranks of one server, or of one of its instances.

    Args:
        on_drain: called with a reason and a rank when a rank was told to stop.
        prefix, first_rank: as in Sequences.
    """

    def __init__(
        self,
        config: FrontendConfig,
        metrics: RequestMetrics,
        on_drain: Callable[[str, int], None],
        prefix: str = "",
        first_rank: int = 0,
    ):
        engine = config.options.engine
        self.num_ranks, self.metrics = config.num_ranks, metrics
        self.ranks: dict[int, Rank] = {}  # the latest that had each slot's place in a view
        self.state = "loading"  # then "serving", "draining", "stopping" or "lost"
        self.reason = "the model is loading"
        self.limits: RequestLimits | None = None  # once all ranks have loaded
        self.ready = asyncio.Event()  # all ranks have loaded
        self.ended = asyncio.Event()  # all ranks have left, or are lost
        num_tiers = max(1, len(config.options.tiers))
        self.router = Router(config.num_ranks, engine.max_running + engine.max_queue, engine.page_size, num_tiers)
        # None: nobody asks it.
        self.forecast: Forecast | None = None
        if config.options.tiers or config.options.num_instances:
            self.forecast = Forecast(self.router, config.options.tiers, engine.max_running)
        settings = engine.seed, prefix, first_rank, self.forecast
        self.sequences = Sequences(self.router, metrics, self.next_seq, *settings)
        self.quiet = self.sequences.quiet  # no sequence runs
        self.max_sequences = config.num_ranks * self.router.max_requests_per_rank
        self.roster = Roster(
            config.num_ranks, self._send, lambda: self.infos[0].num_experts, config.options.serve_without_experts
        )
        self.elasticity = Elasticity(self, config.options)
        self._loading_watch = LoadingWatch(config.options.load_timeout_s, self._give_up_loading)
        self.name = ""  # for lines to the operator, where the server has several pools
        self.handoffs: HandoffEvents | None = None  # likewise
        self._token, self.on_drain = config.token, on_drain
        # A plain mpirun that is told to stop warns its ranks, and kills them all 0.25 s later.
        self._killed_soon = False
        self._listening: asyncio.Server | None = None
        self._seq = 0
        self.stall_s = 2 * env.get("EPRT_TIMEOUT_S")
        self._config = config
        # Of a rank that was waited for in vain: who is to blame, as far as anybody knows more.
        self.culprit_of: Callable[[int], int] = lambda rank: rank

    async def listen(self) -> None:
        """Starts taking the ranks' connections."""
        loop = asyncio.get_running_loop()
        listener = socket.socket(fileno=self._config.listener_fd)
        # Without this reference it would be collected, and closed while ranks still wait to be accepted.
        self._listening = await loop.create_server(lambda: RankConnection(self), sock=listener)
        if self._config.rank0_fd is not None:
            rank0 = socket.socket(fileno=self._config.rank0_fd)
            await loop.create_connection(lambda: RankConnection(self, is_rank0=True), sock=rank0)

    # -- for the API --

    @property
    def num_sequences(self) -> int:
        return len(self.sequences)

    @property
    def infos(self) -> list[msg.EngineInfo]:
        """Every rank's, in rank order; empty until all have loaded."""
        infos = [self.ranks[r].info for r in sorted(self.ranks)]
        return [info for info in infos if info is not None] if self.ready.is_set() else []

    @property
    def stats(self) -> list[EngineStats]:
        """Every rank's latest, in rank order; of a rank that is gone its last."""
        return [s for r in sorted(self.ranks) if (s := self.ranks[r].stats) is not None]

    @property
    def members(self) -> list[Rank]:
        """The ranks that take part, in rank order."""
        return [self.ranks[r] for r in self.roster.members if r in self.ranks]

    def check_open(self) -> None:
        """Raises ApiError 503 unless new requests are taken."""
        if self.state != "serving":
            retry = 5 if self.state == "loading" else None
            raise unavailable(f"no new requests: {self.reason}", code=self.state, retry_after_s=retry)

    def submit(self, prompts: Sequence[Prompt], cache_key: str | None = None, tier: Tier | None = None) -> Generation:
        """Starts params.n sequences of each prompt; sequence i * n + k is the k-th of prompt i. All or none.
        ApiError 503 when not serving, 429 when the ranks are full, or so busy that the tier's limits would be missed.
        cache_key: of requests that begin alike."""
        self.check_open()
        generation = Generation(self.abort, begin_service(tier, prompts, self.metrics))
        try:
            if tier is not None:
                self._check_tier(tier, prompts, cache_key)
            adds = self.sequences.start(generation, prompts, cache_key)
        except (QueueFullError, ApiError) as error:
            if tier is not None:
                self.metrics.tiers.count_request(tier, "refused")
            if isinstance(error, ApiError):
                raise
            message = f"the queue is full: {self.num_sequences} of at most {self.max_sequences} sequences run or wait"
            retry_s = self.metrics.seconds_until_room()
            raise ApiError(429, message, code="queue_full", kind="rate_limit_error", retry_after_s=retry_s) from None
        self.send_numbered(adds)
        return generation

    def _check_tier(self, tier: Tier, prompts: Sequence[Prompt], cache_key: str | None) -> None:
        """ApiError 429 where a limit of the tier would be missed. The longest prompt speaks for all."""
        assert self.forecast is not None, "a server with tiers has one"
        longest = max((token_ids for token_ids, _ in prompts), key=len)
        rank, _, uncached = self.router.predict(longest, cache_key, tier.rank)
        self.forecast.check_first_token(tier, rank, uncached)
        check_step([self.forecast], tier, len(longest))

    async def wait_quiet(self) -> None:
        """Until no sequence runs."""
        await self.quiet.wait()

    def next_seq(self) -> int:
        self._seq += 1
        return self._seq

    @property
    def seq(self) -> int:
        """The latest number."""
        return self._seq

    def send_numbered(self, adds: list[Add]) -> None:
        """To each rank its AddRequests, and one Wake where the last number is another rank's."""
        for rank in self.members:
            messages: list[msg.ToRank] = [add for to_rank, add in adds if to_rank == rank.rank]
            if adds[-1][0] != rank.rank:
                messages.append(msg.Wake(self._seq))
            rank.send(*messages)

    def abort(self, request_id: str, reason: str = "abort") -> None:
        """Ends a sequence. reason: for the metrics."""
        rank = self.sequences.end(request_id, reason)
        if rank is not None and self.state in ("serving", "draining"):
            self.ranks[rank].send(msg.AbortRequest(request_id))

    # -- moving experts --

    def migrate(self, job: MigrationJob) -> None:
        """Sends the job to all ranks, and wakes those that sleep."""
        self._send_all(msg.Migrate(self.next_seq(), job))

    def cancel_migration(self, job_id: int) -> None:
        self._send_all(msg.CancelMigration(job_id))

    async def ask_routing(self, timeout_s: float = 10.0) -> list[msg.RoutingReply]:
        """Every rank's routing sample, in rank order, without tokens where the rank takes no part; TimeoutError where
        one does not answer (a long step)."""
        loop = asyncio.get_running_loop()
        for rank in self.members:
            if rank.routing is None or rank.routing.done():
                rank.routing = loop.create_future()
                rank.send(msg.AskRouting())
        waiting = {rank.rank: asyncio.shield(rank.routing) for rank in self.members if rank.routing}
        replies = dict(zip(waiting, await asyncio.wait_for(asyncio.gather(*waiting.values()), timeout_s)))
        num_layers, _, num_choices = next(iter(replies.values())).shape
        none = msg.RoutingReply((num_layers, 0, num_choices), 1, b"", b"")
        return [replies.get(rank, none) for rank in range(self.num_ranks)]

    def _send(self, rank: int, message: msg.ToRank) -> None:
        self.ranks[rank].send(message)

    def _send_all(self, message: msg.ToRank) -> None:
        for rank in self.members:
            rank.send(message)

    def stalled_ranks(self) -> list[Rank]:
        """Ranks that have work and have reported nothing for twice the deadline of waits between ranks."""
        return [self.ranks[rank] for rank, quiet_s in self.quiet_s.items() if quiet_s > self.stall_s]

    @property
    def quiet_s(self) -> dict[int, float]:
        """For how long each rank that has requests has said nothing of them."""
        now_s, oldest_s = time.monotonic(), self.sequences.oldest_by_rank()
        members = [rank for rank in self.members if rank.rank in oldest_s]
        return {rank.rank: now_s - max(rank.heard_s, oldest_s[rank.rank]) for rank in members}

    # -- for the frontend's life --

    def set_state(self, state: str, reason: str) -> None:
        self.state, self.reason = state, reason

    def end_sequences(self) -> int:
        """Gives every sequence that still runs a last output with finish_reason "abort"; returns how many."""
        ended = self.sequences.abort_all()
        for rank, request_id in ended:
            self.ranks[rank].send(msg.AbortRequest(request_id))
        return len(ended)

    def stop(self) -> None:
        """Tells the ranks to leave together. `ended` is set when they have."""
        self.set_state("stopping", "the server is stopping")
        self.elasticity.refuse_joiners(self.reason)
        self._send_all(msg.Stop(self.next_seq()))

    def lose(self, who: Rank | str, what: str, details: str = "") -> None:
        """The ranks cannot go on: every sequence fails, nothing new is taken. Only the first loss counts. Of several
        lines of details, clients and /health see the first."""
        if self.ended.is_set():
            return
        if isinstance(who, Rank):
            who.lost = True
        num_moved = 0 if self.handoffs is None else self.handoffs.rescue_sequences(self)
        killed = self.state == "draining" and self._killed_soon
        if killed:
            who, what, details = "the ranks", "were ended before running requests were done (use -n to drain)", ""
        generations = self.sequences.drop_all()
        reason = f"{who} {what}{': ' if details else ''}{details.partition(chr(10))[0]}"
        self.set_state("lost", reason)
        for generation in generations:
            generation.fail(ApiError(500, f"{reason}; the request was lost", code="rank_lost"))
        if not killed or generations:
            num = len(generations)
            count = f"; {num} request{'' if num == 1 else 's'} ended with an error" if self.ready.is_set() else ""
            count = f"; {num_moved} sequences go on elsewhere" if num_moved else count
            print_line(f"eprt: {self.name}{who} {what}{count}{': ' if details else ''}{details}")
        self.ended.set()

    # -- from the ranks --

    def on_message(self, rank: Rank, message: msg.ToFrontend) -> None:
        if rank.lost:
            return  # its last words: its requests run elsewhere by now
        if isinstance(message, msg.Heartbeat):
            rank.on_beat(message)
            return
        rank.heard_s = time.monotonic()
        match message:
            case msg.StepReport(outputs, stats, waits):
                rank.stats, rank.waits = stats or rank.stats, waits or rank.waits
                if stats is not None and self.forecast is not None:
                    self._learn_step(self.forecast)
                for output in outputs:
                    self.sequences.add_output(rank.rank, output)
            case msg.Loading():
                rank.on_loading(message)
                if self.state == "loading":
                    self.reason = loading_reason([r.loading for r in self.ranks.values() if r.loading])
            case msg.Ready(info):
                rank.on_loaded(info)
                if self.ready.is_set():
                    self.elasticity.on_loaded(rank)
                elif len(self.ranks) == self.num_ranks and all(r.info for r in self.ranks.values()):
                    self._open(info)
            case msg.Held() | msg.Arrived():
                if self.handoffs is not None:
                    self.handoffs.on_handoff(self, rank, message)
            case msg.RoutingReply():
                if rank.routing is not None and not rank.routing.done():
                    rank.routing.set_result(message)
            case msg.Drain(reason):
                if not self.elasticity.on_told_to_stop(rank, reason):
                    self._killed_soon |= reason in ("SIGTERM", "SIGINT")
                    self.on_drain(reason, rank.rank)
            case msg.BrokenInvariant(text):
                self.metrics.faults.inc()
                _log.error("%s: %s", rank, text)
            case msg.Fatal(text, lost_rank, hung):
                self._on_fatal(rank, text, lost_rank, hung)
            case msg.Lost() | msg.Suspended() | msg.Resumed() | msg.ExpertsLoaded():
                self.elasticity.on_message(rank, message)
            case msg.Bye():
                rank.left = True
                self.check_ended()

    def _learn_step(self, forecast: Forecast) -> None:
        """The latest statistics tell how long steps take."""
        stats = self.stats
        forecast.add_step(max(each.num_running_now for each in stats), max(each.last_step_s for each in stats))

    def check_ended(self) -> None:
        """All ranks that take part may have left."""
        if all(rank.left for rank in self.members):
            self.ended.set()

    def _on_fatal(self, rank: Rank, text: str, lost_rank: int | None, hung: bool) -> None:
        """The rank exits; the cause is its own, or another rank that is gone or hangs."""
        rank.transport.close()  # the rank waits for this before it exits
        if lost_rank in (None, rank.rank):
            self._lose_rank(rank, "failed", text)
            return
        if hung:
            lost_rank = self.culprit_of(lost_rank)
        what = f"hangs, says {rank}" if hung else "was lost"
        self.lose(self.ranks.get(lost_rank, f"rank {lost_rank}"), what, text)

    def _lose_rank(self, rank: Rank, what: str, details: str = "") -> None:
        if not self.elasticity.survive(rank, what, details):
            self.lose(rank, what, details)

    def look_at_loading(self) -> None:
        """To be called now and then: ranks that get no further before they are Ready are given up."""
        if self.state not in ("stopping", "lost") and not self.ended.is_set():
            start = None if self.ready.is_set() else {r: self.ranks.get(r) for r in range(self.num_ranks)}
            self._loading_watch.look(start, self.elasticity.warming)

    def _give_up_loading(self, who: Rank | int, what: str, details: str) -> None:
        if isinstance(who, Rank):
            who.kill()
            self._lose_rank(who, what, details)
        else:
            self.lose(f"rank {who}", what, details)

    def _open(self, info: msg.EngineInfo) -> None:
        self.limits = RequestLimits(info.vocab_size, info.max_model_len, info.kv_tokens)
        for rank in self.ranks:
            self.roster.set_state(rank, "ready")
        if self.state == "loading":
            self.set_state("serving", "")
        self.ready.set()

    def on_hello(self, hello: msg.Hello, transport: asyncio.Transport) -> Rank | None:
        if not hello.has_token(self._token) or not 0 <= hello.rank < self.num_ranks:
            _log.warning("refused a connection that claims to be rank %s", hello.rank)
            transport.abort()
            return None
        rank = Rank(hello.rank, hello.pid, hello.host, transport)
        if hello.rank in self.ranks:
            return rank if self.elasticity.on_hello(rank) else None
        self.ranks[hello.rank] = rank
        self.elasticity.watch(rank)
        return rank

    def on_closed(self, rank: Rank | None, is_rank0: bool) -> None:
        if rank is not None and (rank.left or rank.lost):
            rank.forget_process()
            return
        if self.state == "stopping" and not self.ready.is_set():
            return  # ranks that are told to stop while the model loads exit at once
        if rank is not None:
            self._lose_rank(rank, "was lost: its process is gone")
        elif is_rank0:
            self.lose("rank 0", "was lost before it could say anything")
