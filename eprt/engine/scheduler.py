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

import msgspec
import numpy as np

from eprt.engine.batch_rows import BatchRows
from eprt.engine.kv_cache import PagePool
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
    """One step of one rank: X requests get a token, first the decodes, then the last chunks in order.

    sampled: those requests; request_ids, sampled_row_X: their ids and rows (int64). decode_row_B: the rows of decodes.
    """

    decodes: list[Request]
    chunks: list[Chunk]
    sampled: list[Request]
    request_ids: list[str]
    decode_row_B: np.ndarray
    sampled_row_X: np.ndarray
    num_tokens: int


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """What the sampler chose for Schedule.sampled, in its order.

    token_X: int64, -1 where the logits were not numbers. logprobs, top_logprobs: None where no request wants any, else
    one entry per request, None and () for those that want none.
    """

    token_X: np.ndarray
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
        self._decodes: list[Request] = []  # the decoding ones among the running, and their rows
        self._decode_ids: list[str] = []
        self._decode_row_B = np.zeros(0, dtype=np.int64)
        self._decodes_changed = False
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
            self._retire(request)
        else:
            self.waiting.remove(request)
            del self._requests[request_id]
        return True

    def _retire(self, request: Request) -> None:
        self.running.remove(request)
        del self._requests[request.request_id]
        self._leave(request)

    def _leave(self, request: Request) -> None:
        self._register_full_pages(request, self._num_cached(request))
        self.pool.release(request.pages)
        self.rows.leave(request)
        request.pages = []
        self._decodes_changed |= request.decoding

    # -- choosing --

    def schedule(self) -> Schedule:
        """Chooses the next step's tokens. The caller runs them, then commits."""
        self._make_room_for_decodes()
        decodes, row_B = self._decodes, self._decode_row_B
        chunks = self._schedule_prefills(self.chunk_size - len(decodes))
        if not chunks:
            return Schedule(decodes, chunks, decodes, self._decode_ids, row_B, row_B, len(decodes))
        last = [chunk.request for chunk in chunks if chunk.is_last]
        request_ids = self._decode_ids + [request.request_id for request in last]
        row_X = np.concatenate((row_B, np.array([request.row for request in last], dtype=np.int64)))
        num_tokens = len(decodes) + sum(chunk.end - chunk.start for chunk in chunks)
        return Schedule(decodes, chunks, decodes + last, request_ids, row_B, row_X, num_tokens)

    def _make_room_for_decodes(self) -> None:
        """Sees to it that each decode has a page for its next token; those that cannot have one are preempted."""
        self._refresh_decodes()
        rows, row_B = self.rows, self._decode_row_B
        full_B = rows.length_M[row_B] > rows.num_slots_M[row_B]  # the newest token's cache entry has no slot yet
        for i in np.flatnonzero(full_B).tolist():
            request = self._decodes[i]
            if request.row >= 0:  # else an older one has just preempted it
                self._grow(request)
        self._refresh_decodes()

    def _refresh_decodes(self) -> None:
        if self._decodes_changed:
            self._decodes = [request for request in self.running if request.decoding]
            self._decode_ids = [request.request_id for request in self._decodes]
            self._decode_row_B = np.array([request.row for request in self._decodes], dtype=np.int64)
            self._decodes_changed = False

    def _grow(self, request: Request) -> None:
        """One more page for a decode, preempting the newest requests, at last itself."""
        self._register_full_pages(request, self._num_cached(request))
        while not self.pool.num_available:
            if self._preempt_newest() is request:
                return
        self.rows.grow(request, self.pool.allocate())

    def _preempt_newest(self) -> Request:
        victim = self.running.pop()
        self._leave(victim)
        victim.decoding = False
        self.waiting.appendleft(victim)
        self.num_preemptions += 1
        return victim

    def _schedule_prefills(self, budget: int) -> list[Chunk]:
        chunks: list[Chunk] = []
        for request in self.running if len(self.running) > len(self._decodes) else ():
            if not request.decoding and budget:
                chunks.append(self._cut_chunk(request, budget))
                budget -= chunks[-1].end - chunks[-1].start
        while budget and self.waiting and len(self.running) < self.max_running and self._admit(self.waiting[0]):
            chunks.append(self._cut_chunk(self.running[-1], budget))
            budget -= chunks[-1].end - chunks[-1].start
        return chunks

    def _cut_chunk(self, request: Request, budget: int) -> Chunk:
        start = request.num_prefilled
        end = min(start + budget, request.prefill_end)
        self._register_full_pages(request, end)
        return Chunk(request, start, end, is_last=end == request.prefill_end)

    def _admit(self, request: Request) -> bool:
        """Moves the head of the queue to the running requests if its pages fit."""
        if self.running and self._blocked == (request, self.pool.num_releases):
            return False
        num_tokens = len(request.tokens_L)
        # The last token is always computed (its logits are wanted), and so are prompt tokens that owe a logprob.
        reusable = num_tokens - 1
        if request.prompt_logprobs is not None:
            reusable = min(reusable, len(request.prompt_logprobs))
        known, node = self.pool.match(request.tokens_L, reusable)
        num_new = -(-num_tokens // self.pool.page_size) - len(known)
        if self.pool.num_available - self.pool.num_cached(known) - num_new < len(self.running):
            self._blocked = (request, self.pool.num_releases)
            return False
        self.waiting.popleft()
        self.pool.acquire(known)
        request.pages = known + [self.pool.allocate() for _ in range(num_new)]
        request.prefix_node, request.num_registered = node, len(known)
        request.num_prefilled = len(known) * self.pool.page_size
        request.prefill_end = num_tokens
        self.rows.enter(request)
        self.running.append(request)
        if request.num_cached_tokens is None:
            request.num_cached_tokens = request.num_prefilled
            self.num_prompt_tokens += request.num_prompt
            self.num_cached_tokens += request.num_cached_tokens
        return True

    def _num_cached(self, request: Request) -> int:
        """Tokens of a running request whose cache entries are in its pages."""
        return int(self.rows.length_M[request.row]) - 1 if request.decoding else request.num_prefilled

    def _register_full_pages(self, request: Request, num_tokens: int) -> None:
        """Makes the pages that the request's first num_tokens tokens fill known to the prefix cache."""
        page_size = self.pool.page_size
        for i in range(request.num_registered, num_tokens // page_size):
            tokens = self.rows.tokens_ML[request.row, i * page_size : (i + 1) * page_size]
            request.prefix_node = self.pool.register(request.pages[i], request.prefix_node, tokens)
            request.num_registered += 1

    # -- taking the results --

    def commit(
        self, schedule: Schedule, sampled: SampledTokens, prompt_logprobs: Sequence[list] = ()
    ) -> list[TokenOutput]:
        """Advances every scheduled request and retires the finished ones.

        prompt_logprobs: one list per chunk, for the prompt tokens that follow the chunk's tokens (see runner.py).
        """
        self._advance_prefills(schedule.chunks, prompt_logprobs)
        stopped_X, full_X = self.rows.append(schedule.sampled_row_X, sampled.token_X)
        ended_X = stopped_X | full_X | (sampled.token_X < 0)
        outputs = list(map(TokenOutput, schedule.request_ids, sampled.token_X.tolist()))
        self.num_generated_tokens += len(outputs)
        # Everything beyond a plain token is rare enough to be done one by one.
        for i in range(len(schedule.decodes), len(outputs)):
            outputs[i] = self._with_prompt(outputs[i], schedule.sampled[i])
        if sampled.logprobs is not None:
            outputs = [_with_logprobs(output, i, sampled) for i, output in enumerate(outputs)]
        for i in np.flatnonzero(ended_X).tolist():
            outputs[i] = self._end(outputs[i], schedule.sampled[i], "stop" if stopped_X[i] else "length")
        return outputs

    def _advance_prefills(self, chunks: list[Chunk], prompt_logprobs: Sequence[list]) -> None:
        for chunk in chunks:
            chunk.request.num_prefilled = chunk.end
            chunk.request.decoding = chunk.is_last
            self._decodes_changed |= chunk.is_last
        for chunk, logprobs in zip(chunks, prompt_logprobs):
            if chunk.request.prompt_logprobs is not None:
                chunk.request.prompt_logprobs += logprobs

    def _with_prompt(self, output: TokenOutput, request: Request) -> TokenOutput:
        """The first output also tells what became of the prompt; a later prefill (after a preemption) has nothing to
        add."""
        if self.rows.length_M[request.row] > request.num_prompt + 1:
            return output
        scores = None if request.prompt_logprobs is None else tuple(request.prompt_logprobs)
        return msgspec.structs.replace(output, prompt_logprobs=scores, num_cached_tokens=request.num_cached_tokens or 0)

    def _end(self, output: TokenOutput, request: Request, reason: str) -> TokenOutput:
        self._retire(request)
        if output.token_id < 0:
            self.num_generated_tokens -= 1
            position = len(request.tokens_L) - 1 - request.num_prompt
            error = f"the model's logits at output position {position} are not numbers"
            return msgspec.structs.replace(output, finish_reason="abort", error=error, logprob=None, top_logprobs=())
        if request.params.max_tokens == 0:
            self.num_generated_tokens -= 1
            return msgspec.structs.replace(output, token_id=-1, finish_reason="length", logprob=None, top_logprobs=())
        return msgspec.structs.replace(output, finish_reason=reason)

    def check_integrity(self) -> None:
        """Raises RuntimeError when pages, rows or requests are not accounted for exactly."""
        self.pool.check_integrity(request.pages for request in self.running)
        if len(self._requests) != len(self.running) + len(self.waiting):
            raise RuntimeError(
                f"{len(self._requests)} requests are known, but {len(self.running)} run and {len(self.waiting)} wait"
            )
        for request in self.running:
            self.rows.check_integrity(request)


def _with_logprobs(output: TokenOutput, i: int, sampled: SampledTokens) -> TokenOutput:
    assert sampled.logprobs is not None and sampled.top_logprobs is not None
    if sampled.logprobs[i] is None:
        return output
    return msgspec.structs.replace(output, logprob=sampled.logprobs[i], top_logprobs=sampled.top_logprobs[i])
