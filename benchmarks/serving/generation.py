"""Engines over one model whose steps are timed: prefill and decodes in the middle of their output.

Cache entries are random numbers and nothing is prefilled for a decode. Knows the engine, and nothing of tables.
"""

import gc
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace

import numpy as np
import torch

from benchmarks.serving.dummy_model import of_depth
from benchmarks.tools.timing import Timing, quantile
from eprt import EngineConfig, EPGroup, SamplingParams
from eprt.engine import kv_cache
from eprt.engine.engine import Engine
from eprt.models.loader import load_model

WARM_UP = 6  # steps that are not timed


@dataclass(frozen=True)
class GenerationWorkload:
    """What the engines compute."""

    input: int  # tokens of a prompt
    output: int  # tokens of an answer
    chunk: int  # tokens of a prefill step
    steps: int  # decoding steps that are timed
    one_cache: bool  # all layers share the cache memory of one

    @property
    def context(self) -> int:
        return self.input + self.output // 2

    @property
    def max_model_len(self) -> int:
        return self.context + self.steps + 2 * WARM_UP + 64


class GenerationBench:
    """One model on all ranks, and engines over it."""

    def __init__(self, config: EngineConfig, group: EPGroup, work: GenerationWorkload):
        self.config, self.group, self.work = config, group, work
        start = time.perf_counter()
        self.model = load_model(config, group)
        torch.cuda.synchronize()
        self.load_s = time.perf_counter() - start

    @contextmanager
    def engine(
        self, num_layers: int, requests: int, chunk: int, num_drafts: int = 0, overlap: str = "auto"
    ) -> Iterator[Engine]:
        """With cache for so many requests; the cache holds random numbers."""
        model = of_depth(self.model, num_layers)
        slots = requests * (self.work.max_model_len + self.config.page_size)
        cache_bytes = slots * model.config.kv_dim * 2 * (num_layers + bool(num_drafts))
        config = replace(
            self.config,
            num_speculative_tokens=num_drafts,
            overlap=overlap,
            max_num_seqs=requests,
            chunk_size=chunk,
            kv_cache_gb=cache_bytes / 2**30 + 0.01,
            graph_sizes=(requests * (1 + num_drafts),) if chunk == requests * (1 + num_drafts) else (),
        )
        gc.collect()  # the last engine's cache, which its caller still held when it was closed
        torch.cuda.empty_cache()
        with cache_of_one_layer() if self.work.one_cache else nullcontext():
            engine = Engine(config, self.group, model=model)
        for pages in engine.runner.kv_cache_LPSD[:1] if self.work.one_cache else engine.runner.kv_cache_LPSD:
            pages.normal_()
        yield engine
        self.group.barrier()
        engine.close()

    def prefill(self, num_layers: int, num_prompts: int) -> float:
        """Seconds per step of work.chunk tokens on every rank."""
        w = self.work
        with self.engine(num_layers, max(num_prompts, -(-w.chunk // w.input)), w.chunk) as engine:
            self._fill(engine, num_prompts, w.input, max_tokens=1)
            self.group.barrier()
            num_steps = -(-num_prompts * w.input // w.chunk)
            start = 0.0
            for step in range(num_steps):
                if step == 1:  # the first compiles
                    torch.cuda.synchronize()
                    start = time.perf_counter()
                engine.step()
            torch.cuda.synchronize()
            seconds = time.perf_counter() - start
            while engine.has_work:
                engine.step()
        return seconds / (num_steps - 1)

    def decode(
        self, num_layers: int, requests: int, aheads: Sequence[bool], num_drafts: int = 0, overlap: str = "auto"
    ) -> list["DecodeResult"]:
        w, decoded = self.work, []
        with self.engine(num_layers, requests, requests * (1 + num_drafts), num_drafts, overlap) as engine:
            for ahead in aheads:
                engine.overlap_schedule = ahead and not num_drafts
                self._fill(engine, requests, w.context, max_tokens=(w.steps + 2 * WARM_UP) * (1 + num_drafts))
                with only_last_tokens(engine):
                    engine.step()
                torch.cuda.synchronize()
                before = engine.model.expert_load()
                for _ in range(WARM_UP):
                    engine.step()
                engine.gap.recent_s.clear()
                times = []
                for _ in range(w.steps):
                    start = time.perf_counter()
                    engine.step()
                    times.append(time.perf_counter() - start)
                decoded.append(DecodeResult.from_steps(engine, times, before))
                for request in list(engine.scheduler.running):
                    engine.abort(request.request_id)
                while not engine.step().all_idle:
                    pass
        return decoded

    def _fill(self, engine: Engine, num_requests: int, num_tokens: int, max_tokens: int) -> None:
        rng = np.random.default_rng(self.group.rank)
        params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
        for i in range(num_requests):
            prompt = rng.integers(2, engine.limits.vocab_size, num_tokens).tolist()
            engine.add_request(str(i), prompt, params)


@contextmanager
def cache_of_one_layer() -> Iterator[None]:
    """Engines made meanwhile keep the cache of every layer in the memory of one."""
    allocate = kv_cache.allocate_kv_cache

    def allocate_one(num_layers, *shape_and_kind):
        return allocate(1, *shape_and_kind).expand(num_layers, -1, -1, -1)

    kv_cache.allocate_kv_cache = allocate_one
    yield
    kv_cache.allocate_kv_cache = allocate


@contextmanager
def only_last_tokens(engine: Engine) -> Iterator[None]:
    """Prompts pass for computed but for their last token: what is in the pages already serves as their cache."""
    cut = engine.scheduler._cut_chunk

    def last_token(request, budget):
        request.num_prefilled = max(request.num_prefilled, request.prefill_end - 1)
        return cut(request, budget)

    engine.scheduler._cut_chunk = last_token
    yield
    engine.scheduler._cut_chunk = cut


@dataclass(frozen=True)
class DecodeResult:
    """The decoding steps of one engine."""

    overlap: str  # none, sbo or tbo
    times_s: list[float]  # of each step
    gaps_s: list[float]  # sorted: how long the GPU waited for the host between two steps
    skew: float  # this rank's busiest expert over the mean, mean over layers

    @staticmethod
    def from_steps(engine: Engine, times_s: list[float], load_before: list[list[int]]) -> "DecodeResult":
        torch.cuda.synchronize()
        load = np.array(engine.model.expert_load()) - np.array(load_before)
        skew = float((load.max(axis=1) / load.mean(axis=1).clip(1e-9)).mean()) if load.size else 1.0
        return DecodeResult(engine.overlap.decode, times_s, sorted(engine.gap.recent_s), skew)

    @property
    def timing(self) -> Timing:
        return Timing.from_samples(self.times_s)

    def gap_us(self, q: float) -> float | None:
        return quantile(self.gaps_s, q) * 1e6 if self.gaps_s else None
