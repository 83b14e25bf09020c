"""Which tokens this rank computes in the next step. Pure bookkeeping: no tensor, no other rank.

One step computes at most chunk_size tokens, chosen in this order:

    1. one token of every decoding request, oldest request first;
    2. the next chunk of a prompt whose prefill has begun;
    3. new requests, first come first served, as long as tokens, rows and pages last.

Long prompts therefore never hold up running decodes: they take what a step has left. No more than chunk_size requests
run at once, so that every running request advances in every step.

Pages. A request is admitted with pages for all its tokens, and only if one page per running request stays available
besides (the watermark: decodes will need those soon). A decode that finds no page preempts the newest running request,
which keeps its generated tokens and goes back to the head of the queue, to be prefilled again; its full pages stay in
the prefix cache as long as nobody needs them. Hence no livelock: the oldest request is preempted by nobody and fits by
itself (RequestLimits), so it finishes; then the next one is the oldest.

Full pages of a chunk are made known to the prefix cache when the chunk is scheduled, not when it has been computed: a
later request of the same step may share them, because every layer inserts all cache entries of a step before it
attends. Nothing scheduled in a step is preempted in that step (victims are newer than whoever needs a page).
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from eprt.engine.batch_rows import BatchRows
from eprt.engine.kv_cache import ROOT_NODE, PagePool
from eprt.engine.outputs import TokenOutput
from eprt.engine.request import Request


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens start..end-1 of one request's prefill. is_last: its logits choose the next token."""

    request: Request
    start: int
    end: int
    is_last: bool


@dataclass(frozen=True, slots=True)
class Schedule:
    """One step of one rank. sampled: the requests that get a token, decodes first, then the last chunks in order."""

    decodes: list[Request]
    chunks: list[Chunk]
    sampled: list[Request]
    num_tokens: int


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """What the sampler chose for Schedule.sampled, in its order.

    token_ids: -1 where the logits were not numbers. logprobs, top_logprobs: None where no request wants any, else one
    entry per request, None and () for those that want none.
    """

    token_ids: list[int]
    logprobs: list[float | None] | None = None
    top_logprobs: list[tuple[tuple[int, float], ...]] | None = None


class Scheduler:
    def __init__(self, pool: PagePool, rows: BatchRows, chunk_size: int, max_num_seqs: int):
        self.pool, self.rows = pool, rows
        self.chunk_size = chunk_size
        self.max_running = min(max_num_seqs, chunk_size)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # oldest first
        self.num_preemptions = 0
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.num_generated_tokens = 0
        self._requests: dict[str, Request] = {}
        self._blocked: tuple[Request, int] | None = None  # head of the queue that did not fit, at which num_releases

    @property
    def has_requests(self) -> bool:
        return bool(self._requests)

    # -- arrivals and departures --

    def add(self, request: Request) -> None:
        """Queues a request. Raises ValueError if its id is in use."""
        if request.request_id in self._requests:
            raise ValueError(f"request id {request.request_id!r} is already in use on this rank")
        self._requests[request.request_id] = request
        self.waiting.append(request)

    def abort(self, request_id: str) -> bool:
        """Drops a request and frees its pages at once. False when there is no such request (any more)."""
        request = self._requests.get(request_id)
        if request is None:
            return False
        if request.row >= 0:
            self.running.remove(request)
        else:
            self.waiting.remove(request)
        self._retire(request)
        return True

    def _retire(self, request: Request) -> None:
        request.finished = True
        del self._requests[request.request_id]
        if request.row >= 0:
            self._leave(request)

    def _leave(self, request: Request) -> None:
        self._register_full_pages(request, request.num_computed)
        self.pool.release(request.pages)
        self.rows.leave(request)
        request.pages = []

    # -- choosing --

    def schedule(self) -> Schedule:
        """Chooses the next step's tokens. The caller runs them, then commits."""
        decodes = self._schedule_decodes()
        chunks = self._schedule_prefills(self.chunk_size - len(decodes))
        sampled = decodes + [chunk.request for chunk in chunks if chunk.is_last] if chunks else decodes
        return Schedule(decodes, chunks, sampled, len(decodes) + sum(chunk.end - chunk.start for chunk in chunks))

    def _schedule_decodes(self) -> list[Request]:
        decodes: list[Request] = []
        page_size = self.pool.page_size
        for request in self.running.copy():
            if not request.decoding:
                continue
            if request.num_computed == len(request.pages) * page_size and not self._grow(request):
                break
            decodes.append(request)
        return decodes

    def _grow(self, request: Request) -> bool:
        """One more page for a decode, preempting the newest requests; False if that was this one."""
        self._register_full_pages(request, request.num_computed)
        while not self.pool.num_available:
            if self._preempt_newest() is request:
                return False
        self.rows.grow(request, self.pool.allocate())
        return True

    def _preempt_newest(self) -> Request:
        victim = self.running.pop()
        self._leave(victim)
        victim.num_computed = victim.num_registered = 0
        victim.prefix_node = ROOT_NODE
        victim.decoding = False
        self.waiting.appendleft(victim)
        self.num_preemptions += 1
        return victim

    def _schedule_prefills(self, budget: int) -> list[Chunk]:
        chunks: list[Chunk] = []
        for request in self.running:
            if not request.decoding and budget:
                chunks.append(self._cut_chunk(request, budget))
                budget -= chunks[-1].end - chunks[-1].start
        while budget and self.waiting and len(self.running) < self.max_running and self._admit(self.waiting[0]):
            chunks.append(self._cut_chunk(self.running[-1], budget))
            budget -= chunks[-1].end - chunks[-1].start
        return chunks

    def _cut_chunk(self, request: Request, budget: int) -> Chunk:
        start = request.num_computed
        end = min(start + budget, request.prefill_end)
        self._register_full_pages(request, end)
        return Chunk(request, start, end, is_last=end == request.prefill_end)

    def _admit(self, request: Request) -> bool:
        """Moves the head of the queue to the running requests if its pages fit."""
        if self.running and self._blocked == (request, self.pool.num_releases):
            return False
        num_tokens = len(request.tokens)
        # The last token is always computed (its logits are wanted), and so are prompt tokens that owe a logprob.
        reusable = num_tokens - 1
        if request.prompt_logprobs is not None:
            reusable = min(reusable, len(request.prompt_logprobs))
        known, node = self.pool.match(request.tokens, reusable)
        num_new = -(-num_tokens // self.pool.page_size) - len(known)
        if self.pool.num_available - self.pool.num_cached(known) - num_new < len(self.running):
            self._blocked = (request, self.pool.num_releases)
            return False
        self.waiting.popleft()
        self.pool.acquire(known)
        request.pages = known + [self.pool.allocate() for _ in range(num_new)]
        request.prefix_node, request.num_registered = node, len(known)
        request.num_computed = len(known) * self.pool.page_size
        request.prefill_end = num_tokens
        self.rows.enter(request)
        self.running.append(request)
        if request.num_cached_tokens is None:
            request.num_cached_tokens = min(request.num_computed, request.num_prompt)
            self.num_prompt_tokens += request.num_prompt
            self.num_cached_tokens += request.num_cached_tokens
        return True

    def _register_full_pages(self, request: Request, num_tokens: int) -> None:
        page_size = self.pool.page_size
        for i in range(request.num_registered, num_tokens // page_size):
            tokens = request.tokens[i * page_size : (i + 1) * page_size]
            request.prefix_node = self.pool.register(request.pages[i], request.prefix_node, tokens)
            request.num_registered += 1

    # -- taking the results --

    def commit(
        self, schedule: Schedule, sampled: SampledTokens, prompt_logprobs: Sequence[list] = ()
    ) -> list[TokenOutput]:
        """Advances every scheduled request and retires the finished ones.

        prompt_logprobs: one list per chunk, for the prompt tokens that follow the chunk's tokens (see runner.py).
        """
        for request in schedule.decodes:
            request.num_computed += 1
        for chunk in schedule.chunks:
            chunk.request.num_computed = chunk.end
            chunk.request.decoding = chunk.is_last
        for chunk, logprobs in zip(schedule.chunks, prompt_logprobs):
            if chunk.request.prompt_logprobs is not None:
                chunk.request.prompt_logprobs += logprobs
        outputs = [
            self._accept(request, token_id, i, sampled)
            for i, (request, token_id) in enumerate(zip(schedule.sampled, sampled.token_ids, strict=True))
        ]
        if any(output.finish_reason for output in outputs):
            self.running = [request for request in self.running if not request.finished]
        return outputs

    def _accept(self, request: Request, token_id: int, i: int, sampled: SampledTokens) -> TokenOutput:
        reason = error = None
        if token_id < 0:
            reason, error = "abort", f"the model's logits at output position {request.num_generated} are not numbers"
        elif request.params.max_tokens == 0:
            reason, token_id = "length", -1
        else:
            request.tokens.append(token_id)
            self.num_generated_tokens += 1
            if request.row in self.rows.counts:
                self.rows.counts[request.row].generated_V[token_id] += 1
            if token_id in request.stop_ids:
                reason = "stop"
            elif len(request.tokens) >= request.max_len:
                reason = "length"
        if reason is not None:
            self._retire(request)
        prompt_logprobs = None
        if request.prompt_logprobs is not None and request.num_generated <= 1:
            prompt_logprobs = tuple(request.prompt_logprobs)
        return TokenOutput(
            request.request_id,
            token_id,
            sampled.logprobs[i] if sampled.logprobs and token_id >= 0 else None,
            sampled.top_logprobs[i] if sampled.top_logprobs and token_id >= 0 else (),
            reason,
            prompt_logprobs,
            request.num_cached_tokens or 0,
            error,
        )

    def check_integrity(self) -> None:
        """Raises RuntimeError when pages, rows or requests are not accounted for exactly."""
        self.pool.check_integrity(request.pages for request in self.running)
        if len(self._requests) != len(self.running) + len(self.waiting):
            raise RuntimeError(
                f"{len(self._requests)} requests are known, but {len(self.running)} run and {len(self.waiting)} wait"
            )
        for request in self.running:
            row = self.rows.page_table_MP[request.row, : len(request.pages)].tolist()
            if row != request.pages:
                raise RuntimeError(f"request {request.request_id!r} owns pages {request.pages}, but its row says {row}")
