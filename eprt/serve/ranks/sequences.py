"""Sequences: those under way, the rank that runs each one, and what it takes to go on with one on another rank.

Knows nothing of connections, nor of which ranks take part.
"""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import msgspec

from eprt.engine.outputs import TokenOutput
from eprt.engine.request import QueueFullError
from eprt.engine.router import Router
from eprt.engine.sampling_params import SamplingParams
from eprt.serve.ranks.generation import Generation
from eprt.serve.ranks.messages import AddRequest
from eprt.serve.ranks.request_metrics import RequestMetrics
from eprt.serve.ranks.vllm_metrics import EndedSequence
from eprt.serve.tiers.forecast import Forecast

Add = tuple[int, AddRequest]  # a rank, and what it is told


@dataclass(slots=True)
class _PromptSequences:
    """The n sequences of one prompt."""

    num_open: int  # that have not ended
    most_generated: int = 0  # tokens of the longest one that has


@dataclass(slots=True)
class RunningSequence:
    """One sequence under way."""

    generation: Generation  # that the sequence belongs to
    index: int  # in the generation
    rank: int
    request: AddRequest  # as its first rank was told
    siblings: _PromptSequences  # itself and the prompt's others
    started_s: float
    since_s: float | None  # when it came to the rank that runs it now; None: a token has come from there
    queued_s: float = 0.0  # how long it waited on its rank before it was computed
    num_cached: int = 0  # prompt tokens found in the prefix cache
    first_token_s: float | None = None
    last_token_s: float | None = None
    generated: list[int] = field(default_factory=list)  # tokens that the client has
    num_ahead: int = 0  # tokens that its rank had to compute before its first one, as far as is known; 0: not counted


class Sequences:
    """All sequences of one group of ranks.

    Args:
        next_seq: numbers a message (messages.py).
        seed: of the seeds for requests that bring none.
        prefix: of request ids, where another group of the server numbers its own.
        first_rank: what is added to the ranks' numbers in metrics.
        forecast: is told what is under way; None: nobody asks.
    """

    def __init__(
        self,
        router: Router,
        metrics: RequestMetrics,
        next_seq: Callable[[], int],
        seed: int,
        prefix: str = "",
        first_rank: int = 0,
        forecast: Forecast | None = None,
    ):
        self.router, self.forecast = router, forecast
        self.quiet = asyncio.Event()  # no sequence runs
        self.quiet.set()
        self.num_moved = 0
        self._metrics, self._next_seq = metrics, next_seq
        self._prefix, self._first_rank = prefix, first_rank
        self._running: dict[str, RunningSequence] = {}
        self._seeds = random.Random(seed)

    def __len__(self) -> int:
        return len(self._running)

    def start(
        self,
        generation: Generation,
        prompts: Sequence[tuple[list[int], SamplingParams]],
        cache_key: str | None = None,
        hands_over: bool = False,
    ) -> list[Add]:
        """params.n sequences of each prompt, and what to send. All or none: QueueFullError. cache_key: as in Router.
        hands_over: as in AddRequest."""
        adds: list[Add] = []
        siblings: list[_PromptSequences] = []  # of each add
        first, tier = len(generation.request_ids), _tier_of(generation)
        try:
            for token_ids, params in prompts:
                siblings += [_PromptSequences(params.n)] * params.n
                params = replace(params, seed=self._seeds.getrandbits(63)) if params.seed is None else params
                for sample_idx in range(params.n):
                    seq = self._next_seq()
                    request_id = f"{self._prefix}{seq}"
                    uncached = self.router.predict(token_ids, cache_key, tier)[2] if self.forecast else 0
                    rank = self.router.assign(request_id, token_ids, cache_key, tier)
                    generation.request_ids.append(request_id)
                    if self.forecast is not None:
                        self.forecast.start(request_id, rank, generation.tier, max(uncached, 1))
                    add = AddRequest(seq, request_id, token_ids, params, sample_idx, hands_over=hands_over)
                    adds.append((rank, add))
        except QueueFullError:
            for _, add in adds:
                self._release(add.request_id)
            del generation.request_ids[first:]
            raise
        now_s = time.monotonic()
        for index, ((rank, add), prompt) in enumerate(zip(adds, siblings), first):
            self._running[add.request_id] = RunningSequence(generation, index, rank, add, prompt, now_s, now_s)
        self.quiet.clear()
        return adds

    def move_from(self, rank: int) -> list[Add]:
        """Every sequence of this rank goes on elsewhere, behind what its client has; returns what to send."""
        adds: list[Add] = []
        for sequence in self._running.values():
            if sequence.rank != rank:
                continue
            request, generated = sequence.request, list(sequence.generated)
            sequence.generation.num_moved += 1
            self._reassign(sequence, request.prompt_token_ids + generated)
            adds.append((sequence.rank, msgspec.structs.replace(request, seq=self._next_seq(), generated=generated)))
        self.num_moved += len(adds)
        return adds

    def count_tiers(self) -> Counter[str]:
        """How many sequences of each tier are here, by its name."""
        tiers = (sequence.generation.tier for sequence in self._running.values())
        return Counter(tier.name for tier in tiers if tier is not None)

    # -- between groups of ranks --

    def find(self, request_id: str) -> RunningSequence | None:
        return self._running.get(request_id)

    def take_out(self, request_id: str) -> RunningSequence | None:
        """The sequence goes on in another group; None where it has ended."""
        sequence = self._running.pop(request_id, None)
        self._release(request_id)
        if not self._running:
            self.quiet.set()
        return sequence

    def take_in(self, sequence: RunningSequence, *, numbered: bool = True, hands_over: bool = False) -> Add:
        """The sequence goes on here, behind what its client has; its rank, and what to send. numbered: else the message
        is for Adopt, and the number follows. hands_over: as in AddRequest."""
        request, generated = sequence.request, list(sequence.generated)
        self._reassign(sequence, request.prompt_token_ids + generated, computes=numbered)
        self._running[request.request_id] = sequence
        self.quiet.clear()
        seq = self._next_seq() if numbered else 0
        return sequence.rank, msgspec.structs.replace(request, seq=seq, generated=generated, hands_over=hands_over)

    def _reassign(self, sequence: RunningSequence, token_ids: list[int], computes: bool = True) -> None:
        """Another rank gets the sequence. computes: else its pages come from elsewhere."""
        request_id = sequence.request.request_id
        sequence.rank = self.router.reassign(request_id, token_ids, _tier_of(sequence.generation))
        sequence.since_s = time.monotonic()
        if self.forecast is not None:
            self.forecast.start(request_id, sequence.rank, sequence.generation.tier, len(token_ids) if computes else 0)

    def _release(self, request_id: str, took_s: float | None = None) -> None:
        self.router.release(request_id)
        if self.forecast is not None:
            self.forecast.end(request_id, took_s)

    def request_ids(self) -> list[str]:
        return list(self._running)

    def num_on(self, rank: int) -> int:
        return sum(sequence.rank == rank for sequence in self._running.values())

    def add_output(self, rank: int, output: TokenOutput) -> None:
        """An output that this rank has sent. It is dropped where the sequence has ended, or runs elsewhere."""
        sequence = self._running.get(output.request_id)
        if sequence is None or sequence.rank != rank:
            return
        now_s = time.monotonic()
        if output.token_id >= 0:
            self.router.add_token(output.request_id)
            if sequence.since_s is not None:
                if self.forecast is not None:
                    self.forecast.on_token(output.request_id, now_s - sequence.since_s)
                sequence.since_s = None
            waited_s = now_s - (sequence.last_token_s or sequence.started_s)
            if sequence.first_token_s is None:
                sequence.first_token_s, sequence.queued_s = now_s, output.queued_s
                sequence.num_cached = output.num_cached_tokens
                self._metrics.observe_token(self._first_rank + rank, waited_s, is_first=True)
            else:
                self._metrics.observe_token(self._first_rank + rank, waited_s, is_first=False)
            sequence.last_token_s = now_s
            sequence.generated.append(output.token_id)
        if output.finish_reason is not None:
            self.end(output.request_id, output.finish_reason if output.error is None else "error")
        sequence.generation.add_output(sequence.index, output)

    def end(self, request_id: str, reason: str = "abort") -> int | None:
        """Forgets a sequence; returns the rank that ran it, None where it has ended before. reason: for the metrics,
        "stop", "length", "abort" or "error"."""
        sequence = self._running.pop(request_id, None)
        began_s = None if sequence is None else sequence.first_token_s
        self._release(request_id, None if began_s is None else time.monotonic() - began_s)
        if not self._running:
            self.quiet.set()
        if sequence is None:
            return None
        self._count_end(sequence, reason)
        return sequence.rank

    def _count_end(self, sequence: RunningSequence, reason: str) -> None:
        params, num_generated, siblings = sequence.request.params, len(sequence.generated), sequence.siblings
        ended = EndedSequence(
            reason=reason,
            num_prompt=len(sequence.request.prompt_token_ids),
            num_cached=sequence.num_cached,
            num_generated=num_generated,
            max_tokens=params.max_tokens,
            started_s=sequence.started_s,
            queued_s=sequence.queued_s,
            first_token_s=sequence.first_token_s,
            last_token_s=sequence.last_token_s,
            ended_s=time.monotonic(),
        )
        rank = self._first_rank + sequence.rank
        self._metrics.vllm.observe_end(rank, ended)
        siblings.num_open -= 1
        siblings.most_generated = max(siblings.most_generated, num_generated)
        if not siblings.num_open:
            self._metrics.vllm.observe_prompt(rank, params.n, siblings.most_generated)
        if (service := sequence.generation.service) is not None:
            first_s = (sequence.first_token_s or ended.ended_s) - sequence.started_s
            last_s = (sequence.last_token_s or ended.ended_s) - sequence.started_s
            service.end_sequence(reason, num_generated, first_s, last_s)

    def abort_all(self) -> list[tuple[int, str]]:
        """Gives each a last output with finish_reason "abort"; returns (rank, request id) of each."""
        running = list(self._running.items())
        for request_id, sequence in running:
            sequence.generation.add_output(sequence.index, TokenOutput(request_id, -1, finish_reason="abort"))
            self.end(request_id, "abort")
        return [(sequence.rank, request_id) for request_id, sequence in running]

    def drop_all(self) -> list[Generation]:
        """Forgets all; returns their generations, each once."""
        generations = {id(sequence.generation): sequence.generation for sequence in self._running.values()}
        for sequence in self._running.values():
            self._count_end(sequence, "error")
        self._running.clear()
        self.quiet.set()
        return list(generations.values())

    def oldest_by_rank(self) -> dict[int, float]:
        """When the oldest sequence of each rank that has one was started (time.monotonic)."""
        oldest_s: dict[int, float] = {}
        for sequence in self._running.values():
            oldest_s[sequence.rank] = min(sequence.started_s, oldest_s.get(sequence.rank, sequence.started_s))
        return oldest_s


def _tier_of(generation: Generation) -> int:
    """As the router numbers them; all are alike on a server without tiers."""
    return 0 if generation.tier is None else generation.tier.rank
