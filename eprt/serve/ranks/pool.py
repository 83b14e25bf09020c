"""RankPool: the ranks as the frontend sees them. Hands out sequences, brings back tokens, notices ranks that are gone.

Every sequence ends in exactly one of: a last TokenOutput, an abort by its owner, or the error of the whole pool.
Knows nothing of HTTP or of text.
"""

import asyncio
import logging
import random
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from eprt import env
from eprt.engine.outputs import EngineStats, TokenOutput
from eprt.engine.request import QueueFullError, RequestLimits
from eprt.engine.router import Router
from eprt.engine.sampling_params import SamplingParams
from eprt.ep.migration.job import MigrationJob
from eprt.serve.errors import ApiError, print_line, unavailable
from eprt.serve.options import FrontendConfig
from eprt.serve.ranks import messages as msg
from eprt.serve.ranks.generation import Generation
from eprt.serve.ranks.request_metrics import RequestMetrics

_log = logging.getLogger(__name__)

# A connection that sends this many bytes without a Hello is not a rank's.
_MAX_HELLO_BYTES = 4096


@dataclass(slots=True)
class Rank:
    """One rank's connection, and what it has reported."""

    rank: int
    pid: int
    host: str
    transport: asyncio.Transport
    info: msg.EngineInfo | None = None  # once the model is loaded
    stats: EngineStats | None = None  # the latest
    waits: msg.WaitTotals | None = None  # the latest
    routing: asyncio.Future | None = None  # of the RoutingReply that was asked for last
    heard_s: float = field(default_factory=time.monotonic)  # of its latest message
    left: bool = False  # it said Bye
    lost: bool = False  # it went without a Bye

    def __str__(self) -> str:
        return f"rank {self.rank} (pid {self.pid}, host {self.host})"


@dataclass(slots=True)
class _RunningSequence:
    """One sequence under way."""

    generation: Generation  # that the sequence belongs to
    index: int  # in the generation
    rank: int
    started_s: float
    last_token_s: float | None = None


class RankPool:
    """All ranks of one server. on_drain(reason, rank) is called when a rank was told to stop."""

    def __init__(self, config: FrontendConfig, metrics: RequestMetrics, on_drain: Callable[[str, int], None]):
        engine = config.options.engine
        self.num_ranks, self.metrics = config.num_ranks, metrics
        self.ranks: dict[int, Rank] = {}
        self.state = "loading"  # then "serving", "draining", "stopping" or "lost"
        self.reason = "the model is loading"
        self.limits: RequestLimits | None = None  # once all ranks have loaded
        self.ready = asyncio.Event()  # all ranks have loaded
        self.ended = asyncio.Event()  # all ranks have left, or are lost
        self.quiet = asyncio.Event()  # no sequence runs
        self.quiet.set()
        self.router = Router(config.num_ranks, engine.max_running + engine.max_queue, engine.page_size)
        self.max_sequences = config.num_ranks * self.router.max_requests_per_rank
        self._token, self._on_drain = config.token, on_drain
        # A plain mpirun that is told to stop warns its ranks, and kills them all 0.25 s later.
        self._killed_soon = False
        self._sequences: dict[str, _RunningSequence] = {}
        self._listening: asyncio.Server | None = None
        self._seq = 0
        self._seeds = random.Random(engine.seed)
        self.stall_s = 2 * env.get("EPRT_TIMEOUT_S")
        self._config = config

    async def listen(self) -> None:
        """Starts taking the ranks' connections."""
        loop = asyncio.get_running_loop()
        listener = socket.socket(fileno=self._config.listener_fd)
        # Without this reference it would be collected, and closed while ranks still wait to be accepted.
        self._listening = await loop.create_server(lambda: _Connection(self), sock=listener)
        if self._config.rank0_fd is not None:
            rank0 = socket.socket(fileno=self._config.rank0_fd)
            await loop.create_connection(lambda: _Connection(self, rank=0), sock=rank0)

    # -- for the API --

    @property
    def num_sequences(self) -> int:
        return len(self._sequences)

    @property
    def infos(self) -> list[msg.EngineInfo]:
        """Every rank's, in rank order; empty until all have loaded."""
        infos = [self.ranks[r].info for r in sorted(self.ranks)]
        return [info for info in infos if info is not None] if self.ready.is_set() else []

    @property
    def stats(self) -> list[EngineStats]:
        """Every rank's latest, in rank order."""
        return [s for r in sorted(self.ranks) if (s := self.ranks[r].stats) is not None]

    def check_open(self) -> None:
        """Raises ApiError 503 unless new requests are taken."""
        if self.state != "serving":
            retry = 5 if self.state == "loading" else None
            raise unavailable(f"no new requests: {self.reason}", code=self.state, retry_after_s=retry)

    def submit(self, prompts: Sequence[tuple[list[int], SamplingParams]]) -> Generation:
        """Starts params.n sequences of each prompt; sequence i * n + k is the k-th of prompt i. All or none.
        ApiError 503 when not serving, 429 when the ranks are full."""
        self.check_open()
        generation = Generation(self.abort)
        adds: list[tuple[int, msg.AddRequest]] = []
        try:
            for token_ids, params in prompts:
                params = replace(params, seed=self._seeds.getrandbits(63)) if params.seed is None else params
                for sample_idx in range(params.n):
                    self._seq += 1
                    request_id = str(self._seq)
                    rank = self.router.assign(request_id, token_ids)
                    generation.request_ids.append(request_id)
                    adds.append((rank, msg.AddRequest(self._seq, request_id, token_ids, params, sample_idx)))
        except QueueFullError:
            for request_id in generation.request_ids:
                self.router.release(request_id)
            message = f"the queue is full: {self.num_sequences} of at most {self.max_sequences} sequences run or wait"
            retry_s = self.metrics.seconds_until_room()
            raise ApiError(429, message, code="queue_full", kind="rate_limit_error", retry_after_s=retry_s) from None
        now_s = time.monotonic()
        for index, (rank, add) in enumerate(adds):
            self._sequences[add.request_id] = _RunningSequence(generation, index, rank, now_s)
        self.quiet.clear()
        self._send_numbered(adds)
        return generation

    def _send_numbered(self, adds: list[tuple[int, msg.AddRequest]]) -> None:
        """To each rank its AddRequests, and one Wake where the last number is another rank's."""
        for rank, connection in self.ranks.items():
            messages: list[msg.ToRank] = [add for to_rank, add in adds if to_rank == rank]
            if adds[-1][0] != rank:
                messages.append(msg.Wake(self._seq))
            connection.transport.write(b"".join(map(msg.pack, messages)))

    def abort(self, request_id: str) -> None:
        sequence = self._forget(request_id)
        if sequence is not None and self.state in ("serving", "draining"):
            self.ranks[sequence.rank].transport.write(msg.pack(msg.AbortRequest(request_id)))

    def _forget(self, request_id: str) -> _RunningSequence | None:
        sequence = self._sequences.pop(request_id, None)
        self.router.release(request_id)
        if not self._sequences:
            self.quiet.set()
        return sequence

    # -- moving experts --

    def migrate(self, job: MigrationJob) -> None:
        """Sends the job to all ranks, and wakes those that sleep."""
        self._seq += 1
        self._send_all(msg.Migrate(self._seq, job))

    def cancel_migration(self, job_id: int) -> None:
        self._send_all(msg.CancelMigration(job_id))

    async def ask_routing(self, timeout_s: float = 10.0) -> list[msg.RoutingReply]:
        """Every rank's routing sample, in rank order; TimeoutError where one does not answer (a long step)."""
        loop = asyncio.get_running_loop()
        for rank in self.ranks.values():
            if rank.routing is None or rank.routing.done():
                rank.routing = loop.create_future()
                rank.transport.write(msg.pack(msg.AskRouting()))
        waiting = [self.ranks[r].routing for r in sorted(self.ranks)]
        return await asyncio.wait_for(asyncio.gather(*(asyncio.shield(w) for w in waiting if w)), timeout_s)

    def _send_all(self, message: msg.ToRank) -> None:
        for rank in self.ranks.values():
            rank.transport.write(msg.pack(message))

    def stalled_ranks(self) -> list[Rank]:
        """Ranks that have work and have reported nothing for twice the deadline of waits between ranks."""
        now_s = time.monotonic()
        oldest_s: dict[int, float] = {}
        for sequence in self._sequences.values():
            oldest_s[sequence.rank] = min(sequence.started_s, oldest_s.get(sequence.rank, now_s))
        return [
            rank
            for rank in self.ranks.values()
            if now_s - max(rank.heard_s, oldest_s.get(rank.rank, now_s)) > self.stall_s
        ]

    # -- for the frontend's life --

    def set_state(self, state: str, reason: str) -> None:
        self.state, self.reason = state, reason

    def end_sequences(self) -> int:
        """Gives every sequence that still runs a last output with finish_reason "abort"; returns how many."""
        running = list(self._sequences.items())
        for request_id, sequence in running:
            output = TokenOutput(request_id, token_id=-1, finish_reason="abort")
            sequence.generation.add_output(sequence.index, output)
            self.abort(request_id)
        return len(running)

    def stop(self) -> None:
        """Tells the ranks to leave together. `ended` is set when they have."""
        self.set_state("stopping", "the server is stopping")
        self._seq += 1
        self._send_all(msg.Stop(self._seq))

    def lose(self, who: Rank | str, what: str, details: str = "") -> None:
        """The ranks cannot go on: every sequence fails, nothing new is taken. Only the first loss counts. Of several
        lines of details, clients and /health see the first."""
        if self.ended.is_set():
            return
        if isinstance(who, Rank):
            who.lost = True
        killed = self.state == "draining" and self._killed_soon
        if killed:
            who, what, details = "the ranks", "were ended before running requests were done (use -n to drain)", ""
        generations = {id(s.generation): s.generation for s in self._sequences.values()}
        reason = f"{who} {what}{': ' if details else ''}{details.partition(chr(10))[0]}"
        self.set_state("lost", reason)
        self._sequences.clear()
        self.quiet.set()
        for generation in generations.values():
            generation.fail(ApiError(500, f"{reason}; the request was lost", code="rank_lost"))
        if not killed or generations:
            num = len(generations)
            count = f"; {num} request{'' if num == 1 else 's'} ended with an error" if self.ready.is_set() else ""
            print_line(f"eprt: {who} {what}{count}{': ' if details else ''}{details}")
        self.ended.set()

    # -- from the ranks --

    def _on_message(self, rank: Rank, message: msg.ToFrontend) -> None:
        rank.heard_s = time.monotonic()
        match message:
            case msg.StepReport(outputs, stats, waits):
                rank.stats, rank.waits = stats or rank.stats, waits or rank.waits
                for output in outputs:
                    self._on_output(rank, output)
            case msg.Ready(info):
                rank.info = info
                if len(self.ranks) == self.num_ranks and all(r.info for r in self.ranks.values()):
                    self._open(info)
            case msg.RoutingReply():
                if rank.routing is not None and not rank.routing.done():
                    rank.routing.set_result(message)
            case msg.Drain(reason):
                self._killed_soon |= reason in ("SIGTERM", "SIGINT")
                self._on_drain(reason, rank.rank)
            case msg.BrokenInvariant(text):
                self.metrics.faults.inc()
                _log.error("%s: %s", rank, text)
            case msg.Fatal(text, lost_rank):
                if lost_rank is None:
                    self.lose(rank, "failed", text)
                else:
                    self.lose(self.ranks.get(lost_rank, f"rank {lost_rank}"), "was lost", text)
                rank.transport.close()  # the rank waits for this before it exits
            case msg.Bye():
                rank.left = True
                if all(r.left for r in self.ranks.values()):
                    self.ended.set()

    def _open(self, info: msg.EngineInfo) -> None:
        self.limits = RequestLimits(info.vocab_size, info.max_model_len, info.kv_tokens)
        if self.state == "loading":
            self.set_state("serving", "")
        self.ready.set()

    def _on_output(self, rank: Rank, output: TokenOutput) -> None:
        sequence = self._sequences.get(output.request_id)
        if sequence is None:
            return  # aborted a moment ago
        now_s = time.monotonic()
        if output.token_id >= 0:
            self.router.add_token(output.request_id)
            waited_s = now_s - (sequence.last_token_s or sequence.started_s)
            self.metrics.observe_token(waited_s, is_first=sequence.last_token_s is None)
            sequence.last_token_s = now_s
        if output.finish_reason is not None:
            self._forget(output.request_id)
        sequence.generation.add_output(sequence.index, output)

    def _on_hello(self, hello: msg.Hello, transport: asyncio.Transport) -> Rank | None:
        if hello.token != self._token or hello.rank in self.ranks or not 0 <= hello.rank < self.num_ranks:
            _log.warning("refused a connection that claims to be rank %s", hello.rank)
            return None
        self.ranks[hello.rank] = Rank(hello.rank, hello.pid, hello.host, transport)
        return self.ranks[hello.rank]

    def _on_closed(self, rank: Rank | None, is_rank0: bool) -> None:
        if rank is not None and rank.left:
            return
        if self.state == "stopping" and not self.ready.is_set():
            return  # ranks that are told to stop while the model loads exit at once
        if rank is not None:
            self.lose(rank, "was lost: its process is gone")
        elif is_rank0:
            self.lose("rank 0", "was lost before it could say anything")


class _Connection(asyncio.Protocol):
    """One rank's byte stream. The first message must be its Hello."""

    def __init__(self, pool: RankPool, rank: int | None = None):
        self._pool, self._is_rank0 = pool, rank == 0
        self._unpacker = msg.Unpacker(msg.ToFrontend)
        self._rank: Rank | None = None
        self._num_bytes = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: asyncio.Transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        self._num_bytes += len(data)
        try:
            for message in self._unpacker.add_bytes(data):
                if self._rank is not None:
                    self._pool._on_message(self._rank, message)
                    continue
                self._rank = self._pool._on_hello(message, self._transport) if isinstance(message, msg.Hello) else None
                if self._rank is None:
                    self._transport.abort()
                    return
        except ValueError as error:  # bytes that are not a message
            _log.warning("a connection sent %s", error)
            self._transport.abort()
            return
        if self._rank is None and self._num_bytes > _MAX_HELLO_BYTES:
            self._transport.abort()

    def connection_lost(self, exc) -> None:
        self._pool._on_closed(self._rank, self._is_rank0)
