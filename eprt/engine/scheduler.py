"""Which tokens this rank computes in the next step. Pure bookkeeping: no tensor, no other rank.

One step computes at most chunk_size tokens, chosen in this order:

    1. one token of every decoding request, oldest request first;
    2. the next chunk of a prompt whose prefill has begun;
    3. new requests, as long as tokens, rows and pages last.

Whatever is served first, by age or in order of arrival, is served by priority before (SamplingParams.priority, 0 unless
a client says otherwise; smaller ones first). A waiting request for which there is no room displaces running requests of
larger priority, the newest first, if that makes room.

Long prompts therefore never delay running decodes: they take what a step has left. No more than chunk_size requests
run at once, so that every running request advances in every step.

Pages. A request is admitted with pages for all its tokens, and only if one page per running request stays available
besides (the watermark: decodes will need those soon). A decode that finds no page preempts the last running request,
which keeps its generated tokens and goes back to the head of the queue, to be prefilled again (its generated tokens as
decodes, see Scheduler); its full pages stay in the prefix cache until they are needed. Hence no livelock: nothing
preempts the first request, and it fits by itself (RequestLimits), so it finishes; then the next one is the first.

The prefix cache learns the full pages of a chunk when the chunk is scheduled, not when it has been computed: a later
request of the same step may share them, because every layer inserts all cache entries of a step before it attends.
Nothing scheduled in a step is preempted in that step (victims come behind the request that needs a page).

A step ends in two parts, so that the next one can be scheduled while it computes: advance() counts its tokens, commit()
learns which they are. A request whose last possible token is being computed is not scheduled again; one that turns out
to have stopped loses what later steps compute for it, and its pages are free at once: what these steps still write
comes before whatever the pages' next owner writes. Only preemption needs to know all tokens: must_preempt() says
beforehand whether it will happen.
"""

import time
from bisect import insort
from collections.abc import Sequence

import msgspec
import numpy as np

from eprt.engine.batch_rows import BatchRows
from eprt.engine.draft_room import choose_drafts
from eprt.engine.kv_cache import PagePool
from eprt.engine.outputs import PromptLogprob, TokenOutput
from eprt.engine.request import Request
from eprt.engine.request_pages import RequestPages
from eprt.engine.request_queue import RequestQueue
from eprt.engine.schedule import Chunk, SampledTokens, Schedule
from eprt.engine.transit import Transit


class Scheduler:
    """replays_decodes: tokens that were generated before a request was queued (again) are computed as decodes, several
    in a step, and not as a prompt: to the bit what was computed when they were generated."""

    def __init__(
        self, pool: PagePool, rows: BatchRows, chunk_size: int, max_running: int, replays_decodes: bool = False
    ):
        self.pool, self.rows, self.replays_decodes = pool, rows, replays_decodes
        self.pages = RequestPages(pool, rows)
        self.chunk_size, self.max_running = chunk_size, max_running
        self.waiting = RequestQueue()
        self.running: list[Request] = []  # by priority, oldest first
        self.num_preemptions = 0
        self.num_prompt_tokens = self.num_cached_tokens = self.num_generated_tokens = 0
        self.num_drafts = self.num_drafted_tokens = self.num_accepted_tokens = 0
        self.transit = Transit(self.pages)
        self.requests: dict[str, Request] = {}  # waiting, arrived and running, by id
        # The running requests that decode and are not full, with their ids and rows; refreshed where this has changed.
        self._decodes: list[Request] = []
        self._decode_ids: list[str] = []
        self._decode_row_B = np.zeros(0, dtype=np.int64)
        self._decodes_changed = False
        self.lacks_experts = False  # steps compute without some experts (Engine.enter_view)
        self._may_have_lacked = False  # some request may have been computed so
        self._blocked: tuple[Request, int] | None = None  # head of the queue that did not fit, at which num_releases

    @property
    def has_requests(self) -> bool:
        return bool(self.requests)

    # -- arrivals and departures --

    def add_request(self, request: Request, arrived: bool = False) -> None:
        """Queues a request. arrived: its pages are filled, but for its last token. Raises ValueError if its id is in
        use."""
        if request.request_id in self.requests:
            raise ValueError(f"request id {request.request_id!r} is already in use on this rank")
        self.requests[request.request_id] = request
        if arrived:
            self.transit.arrived.append(request)
        else:
            self.waiting.add_request(request)

    def start_arrived(self) -> list[Request]:
        """Lets arrived requests decode from the next schedule() on, as far as there are rows. Returns them."""
        started = self.transit.take_arrived(self.max_running - len(self.running))
        for request in started:
            self.rows.assign_row(request)
            request.decoding = True
            insort(self.running, request, key=lambda running: running.priority)
            self.pages.register_full(request, self._num_cached(request), is_written=True)
        self._decodes_changed |= bool(started)
        return started

    def abort(self, request_id: str) -> bool:
        """Drops a request and frees its pages at once. False if there is no such request (any more)."""
        request = self.requests.get(request_id)
        if request is None:
            return self.transit.release_held(request_id)
        if request.row >= 0:
            self._retire(request)
        else:
            del self.requests[request_id]
            if not self.transit.drop_arrived(request):
                self.waiting.remove(request)
        return True

    def _retire(self, request: Request, keeps_pages: bool = False) -> None:
        self.running.remove(request)
        del self.requests[request.request_id]
        self._free_pages_and_row(request, keeps_pages)

    def _free_pages_and_row(self, request: Request, keeps_pages: bool = False) -> None:
        self.pages.register_full(request, self._num_cached(request), is_written=True)
        self.rows.release_row(request)
        if not keeps_pages:
            self.pages.release(request)
        self._decodes_changed |= request.decoding

    # -- choosing --

    def schedule(self) -> Schedule:
        """Chooses the next step's tokens. The caller runs them, then calls advance() and commit()."""
        for victim in self.waiting.find_displaced(self.running, self.pool, self.max_running):
            self._preempt(victim)
        self._make_room_for_decodes()
        if self.lacks_experts:
            self._may_have_lacked = True
            for request in self._decodes:
                request.note_missing_experts()
        sampled, request_ids, row_S = self._decodes, self._decode_ids, self._decode_row_B
        draft_S = choose_drafts(self._decodes, row_S, self.rows, self.pool, len(self.running))
        num_tokens = len(sampled) + (0 if draft_S is None else int(draft_S.sum()))
        decode_bookmarks = self.pages.begin_for_decodes(self._decodes, row_S, draft_S, len(self.running))
        chunks = self._schedule_prefills(self.chunk_size - num_tokens)
        last = [chunk.request for chunk in chunks if chunk.is_last]
        if last:
            sampled, request_ids = sampled + last, request_ids + [request.request_id for request in last]
            row_S = np.append(row_S, [request.row for request in last])
            draft_S = None if draft_S is None else np.append(draft_S, [0] * len(last))
        return Schedule(
            decodes=self._decodes,
            chunks=chunks,
            sampled=sampled,
            request_ids=request_ids,
            row_S=row_S,
            length_S=self.rows.length_M[row_S],
            holder_S=self.rows.holder_M[row_S],
            num_tokens=num_tokens + sum(chunk.num_tokens for chunk in chunks),
            draft_S=draft_S,
            decode_bookmarks=decode_bookmarks,
        )

    def must_preempt(self) -> bool:
        """Whether schedule() would preempt a request now."""
        self._refresh_decodes()
        displaced = self.waiting.find_displaced(self.running, self.pool, self.max_running)
        return bool(displaced) or len(self._full_decodes()) > self.pool.num_available

    def _make_room_for_decodes(self) -> None:
        """Gives each decode a page for its next token; those that cannot have one are preempted."""
        self._refresh_decodes()
        for i in self._full_decodes():
            request = self._decodes[i]
            if request.row >= 0:  # else an older one has just preempted it
                self._add_page(request)
        self._refresh_decodes()

    def _full_decodes(self) -> list[int]:
        """Indices of the decodes whose newest token's cache entry has no slot yet."""
        row_B = self._decode_row_B
        return np.flatnonzero(self.rows.length_M[row_B] > self.rows.num_slots_M[row_B]).tolist()

    def _refresh_decodes(self) -> None:
        if self._decodes_changed:
            length_M, max_len_M = self.rows.length_M, self.rows.max_len_M
            self._decodes = [r for r in self.running if r.decoding and length_M[r.row] < max_len_M[r.row]]
            self._decode_ids = [request.request_id for request in self._decodes]
            self._decode_row_B = np.array([request.row for request in self._decodes], dtype=np.int64)
            self._decodes_changed = False

    def _add_page(self, request: Request) -> None:
        """Adds a page to a decode; where there is none it preempts the last requests, in the end this one."""
        self.pages.register_full(request, self._num_cached(request))
        while not self.pool.num_available:
            victim = self.running[-1]
            self._preempt(victim)
            if victim is request:
                return
        self.rows.append_page(request, self.pool.allocate())

    def _preempt(self, victim: Request) -> None:
        self.running.remove(victim)
        self._requeue(victim)

    def _schedule_prefills(self, budget: int) -> list[Chunk]:
        chunks: list[Chunk] = []
        for request in self.running if len(self.running) > len(self._decodes) else ():
            if not request.decoding and budget:
                chunks.append(self._cut_chunk(request, budget))
                budget -= chunks[-1].num_tokens
        while budget and self.waiting and len(self.running) < self.max_running:
            request = self.waiting.head
            if not self._admit(request, not chunks):
                break
            chunks.append(self._cut_chunk(request, budget, is_first=True))
            budget -= chunks[-1].num_tokens
        return sorted(chunks, key=lambda chunk: not chunk.decoded)

    def _cut_chunk(self, request: Request, budget: int, is_first: bool = False) -> Chunk:
        start = request.num_prefilled
        end = min(start + budget, request.prefill_end)
        decoded = self.replays_decodes and start >= request.num_prompt
        if self.replays_decodes and not decoded:
            end = min(end, request.num_prompt)
        known = request.num_registered, request.prefix_node
        if self.lacks_experts:
            request.note_missing_experts()
        moves = request.takeover, self.pages.begin_bookmarks(request, start, end, len(self.running))
        self.pages.register_full(request, end)
        return Chunk(request, request.row, start, end, end == request.prefill_end, is_first, decoded, *known, *moves)

    def _admit(self, request: Request, is_alone: bool) -> bool:
        """Moves the head of the queue to the running requests if its pages fit. is_alone: the step has no chunk yet."""
        if self.running and self._blocked == (request, self.pool.num_releases):
            return False
        # The last token is always computed, for its logits, and so are prompt tokens that a wanted logprob depends on.
        reusable = len(request.tokens_L) - 1
        if self.replays_decodes and not is_alone:  # else a decode could read pages that a chunk behind it fills
            reusable = min(reusable, request.num_prompt - 1)
        if request.prompt_logprobs is not None:
            reusable = min(reusable, len(request.prompt_logprobs))
        if not self.pages.take_over(request, reusable, len(self.running)):
            self._blocked = (request, self.pool.num_releases)
            return False
        self.waiting.remove(request)
        self.rows.assign_row(request)
        insort(self.running, request, key=lambda running: running.priority)
        if request.num_cached_tokens is None:
            request.num_cached_tokens = request.num_prefilled
            request.queued_s = time.monotonic() - request.arrived_s
            self.num_prompt_tokens += request.num_prompt
            self.num_cached_tokens += request.num_cached_tokens
        return True

    def _num_cached(self, request: Request) -> int:
        """Tokens of a running request whose cache entries are in its pages."""
        return int(self.rows.length_M[request.row]) - 1 if request.decoding else request.num_prefilled

    # -- results --

    def advance(self, schedule: Schedule) -> None:
        """The step has been launched: counts a token for each request that gets one, and the chunks as prefilled."""
        for chunk in schedule.chunks:
            chunk.request.num_prefilled = chunk.end
            chunk.request.decoding = chunk.is_last
            self._decodes_changed |= chunk.is_last
        self.pages.end_step([chunk.request for chunk in schedule.chunks])
        self._decodes_changed |= bool(self.rows.count_token(schedule.row_S).any())

    def drop_step(self, schedule: Schedule, advanced: bool = False) -> None:
        """The step is thrown away, the latest one that is not committed: its tokens will be computed again.

        Requests that it admitted go back to the queue: they may share pages that it was to fill. The others keep their
        pages, of which the prefix cache forgets those that it was to fill. What the cache knows of pages without an
        owner is in doubt where advance() was called (advanced) or a request of a chunk has left since, and forgotten.
        """
        here_S = self.rows.holder_M[schedule.row_S] == schedule.holder_S
        row_X = schedule.row_S[here_S]
        in_doubt = advanced or any(chunk.request.row < 0 for chunk in schedule.chunks)
        if advanced:
            self.rows.length_M[row_X], self.rows.unknown_M[row_X] = schedule.length_S[here_S], False
            for request in schedule.decodes:
                if request.row >= 0:
                    for page in request.pages[self._num_cached(request) // self.pool.page_size :]:
                        self.pool.forget(page)
        self.rows.num_draft_M[row_X] = 0
        self.pages.drop_step([] if advanced else schedule.bookmarks)
        for chunk in reversed(schedule.chunks):
            request = chunk.request
            if request.row < 0:  # aborted since
                continue
            for page in request.pages[chunk.num_registered : request.num_registered]:
                self.pool.forget(page)
            request.num_registered, request.prefix_node = chunk.num_registered, chunk.prefix_node
            request.num_prefilled, request.decoding = chunk.start, False
            if chunk.is_first:
                self._preempt(request)
        if in_doubt:
            self.pool.forget_cached()
        self._decodes_changed = True

    def _requeue(self, request: Request) -> None:
        self._free_pages_and_row(request)
        request.decoding = False
        self.waiting.add_request(request, is_first=True)
        self.num_preemptions += 1

    def commit(
        self,
        schedule: Schedule,
        sampled: SampledTokens,
        prompt_logprobs: Sequence[list[PromptLogprob]] = (),
        accepted_S: np.ndarray | None = None,
    ) -> list[TokenOutput]:
        """Records the tokens of a step that has been advanced, and retires the requests that they finish.

        prompt_logprobs: one list per chunk, for the prompt tokens that follow the chunk's tokens (see runner.py).
        accepted_S: int64, how many drafts of each request are among the tokens; None if there were none. Requests that
        have left their row since are skipped.
        """
        if schedule.draft_S is not None and accepted_S is not None:
            self.num_drafts += int(np.count_nonzero(schedule.draft_S))
            self.num_drafted_tokens += int(schedule.draft_S.sum())
            self.num_accepted_tokens += int(accepted_S.sum())
        for chunk, logprobs in zip(schedule.chunks, prompt_logprobs):
            if chunk.request.prompt_logprobs is not None:
                chunk.request.prompt_logprobs += logprobs
        here_S = self.rows.holder_M[schedule.row_S] == schedule.holder_S
        if accepted_S is None and here_S.all():
            return self._record(schedule.sampled, schedule.request_ids, schedule.row_S, schedule.length_S, sampled)[0]
        accepted_S = np.zeros_like(schedule.length_S) if accepted_S is None else accepted_S
        outputs: list[TokenOutput] = []
        index_S = np.flatnonzero(here_S)
        for j in range(int(accepted_S.max(initial=0)) + 1):
            requests = [schedule.sampled[i] for i in index_S.tolist()]
            request_ids = [request.request_id for request in requests]
            row_X, position_X = schedule.row_S[index_S], schedule.length_S[index_S] + j
            if j:
                self.rows.count_token(row_X)
            selected = sampled.select(schedule.first_S[index_S] + j)
            more, ended_S = self._record(requests, request_ids, row_X, position_X, selected)
            outputs += more
            index_S = index_S[~ended_S & (accepted_S[index_S] > j)]
        return outputs

    def _record(
        self,
        requests: list[Request],
        request_ids: list[str],
        row_X: np.ndarray,
        position_X: np.ndarray,
        sampled: SampledTokens,
    ) -> tuple[list[TokenOutput], np.ndarray]:
        """Records one token for each of these requests. Returns the outputs, and which requests ended (bool)."""
        stopped_X, full_X = self.rows.store_tokens(row_X, position_X, sampled.token_X)
        ended_X = stopped_X | full_X | (sampled.token_X < 0)
        outputs = list(map(TokenOutput, request_ids, sampled.token_X.tolist()))
        self.num_generated_tokens += len(outputs)
        # Everything beyond a plain token is rare enough to be done one by one.
        for i in np.flatnonzero(position_X == self.rows.num_prompt_M[row_X]).tolist():
            scores = requests[i].prompt_logprobs
            outputs[i] = msgspec.structs.replace(
                outputs[i],
                prompt_logprobs=None if scores is None else tuple(scores),
                num_cached_tokens=requests[i].num_cached_tokens or 0,
                queued_s=requests[i].queued_s,
            )
        for i, request in enumerate(requests if self._may_have_lacked else ()):
            if request.lacked_experts:
                outputs[i] = msgspec.structs.replace(outputs[i], lacked_experts=True)
        for i, logprob in enumerate(sampled.logprobs or ()):
            if logprob is not None:
                outputs[i] = msgspec.structs.replace(outputs[i], logprob=logprob[0], top_logprobs=logprob[1])
        self.rows.length_M[row_X[ended_X]] = position_X[ended_X] + 1
        for i in np.flatnonzero(ended_X).tolist():
            outputs[i] = self._end_request(outputs[i], requests[i], "stop" if stopped_X[i] else "length")
        return outputs, ended_X

    def _end_request(self, output: TokenOutput, request: Request, reason: str) -> TokenOutput:
        hands_over = request.hands_over and reason == "length" and output.token_id >= 0
        self._retire(request, keeps_pages=hands_over)
        if hands_over:
            self.transit.hold_pages(request)
            return output
        ended = request.last_output(output, reason)
        self.num_generated_tokens -= ended.token_id < 0
        return ended

    def check_integrity(self, arriving: Sequence[Request] = ()) -> None:
        """Raises RuntimeError naming what is not accounted for exactly. arriving: requests not known here."""
        self.pool.check_integrity(self.pages.owned([*self.running, *self.transit.requests, *arriving]))
        num_waiting = len(self.waiting) + len(self.transit.arrived)
        if len(self.requests) != len(self.running) + num_waiting:
            raise RuntimeError(
                f"{len(self.requests)} requests are known, but {len(self.running)} run and {num_waiting} wait"
            )
        for request in self.running:
            self.rows.check_integrity(request)
