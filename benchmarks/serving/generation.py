"""Engines over one model whose steps are timed: prefill and decodes in the middle of their output.

Cache entries are random numbers and nothing is prefilled for a decode. Knows the engine, and nothing of tables.
"""

import gc
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from benchmarks.serving.dummy_model import of_depth
from benchmarks.serving.skewed_gates import max_over_mean
from benchmarks.tools.timing import Timing, quantile
from eprt import EngineConfig, EPGroup, SamplingParams
from eprt.engine import cache_layout
from eprt.engine.engine import Engine
from eprt.layers.moe import EPMoE
from eprt.models.loader import load_model
from eprt.ops.kv_format import KVFormat

WARM_UP = 6  # steps that are not timed
PAGES_AT_ONCE = 1024


@dataclass(frozen=True)
class DecodeSettings:
    """One series of decoding steps."""

    requests: int  # of each rank
    steps: int  # that are timed
    num_drafts: int = 0
    overlap: str = "auto"  # none, sbo, tbo
    recorded: bool = True  # as a CUDA graph; else launched anew each time
    kv_cache_dtype: str | None = None  # None: that of the benchmark's configuration

    @property
    def rows(self) -> int:
        return self.requests * (1 + self.num_drafts)


@dataclass(frozen=True)
class GenerationWorkload:
    """What the engines compute."""

    input: int  # tokens of a prompt
    output: int  # tokens of an answer
    chunk: int  # tokens of a prefill step
    one_cache: bool  # all layers share the cache memory of one

    @property
    def context(self) -> int:
        """Cached tokens of a request in the middle of its answer."""
        return self.input + self.output // 2

    @property
    def max_model_len(self) -> int:
        return self.input + self.output + 2 * WARM_UP + 64


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
        self,
        num_layers: int,
        requests: int,
        chunk: int,
        num_drafts: int = 0,
        overlap: str = "auto",
        graph_sizes: tuple[int, ...] = (),
        kv_cache_dtype: str | None = None,
    ) -> Iterator[Engine]:
        """With cache for so many requests; the cache holds random numbers."""
        model = of_depth(self.model, num_layers)
        slots = requests * (self.work.max_model_len + self.config.page_size)
        entry = self.entry(kv_cache_dtype)
        cache_bytes = slots * entry.width * entry.dtype.itemsize * (num_layers + bool(num_drafts))
        config = replace(
            self.config,
            num_speculative_tokens=num_drafts,
            overlap=overlap,
            max_num_seqs=requests,
            chunk_size=chunk,
            kv_cache_gb=cache_bytes / 2**30 + 0.01,
            graph_sizes=graph_sizes,
            kv_cache_dtype=kv_cache_dtype or self.config.kv_cache_dtype,
        )
        gc.collect()  # the last engine's cache, which its caller still held when it was closed
        torch.cuda.empty_cache()
        with cache_of_one_layer() if self.work.one_cache else nullcontext():
            engine = Engine(config, self.group, model=model)
        for cache in engine.runner.cache_L[:1] if self.work.one_cache else engine.runner.cache_L:
            self._fill_pages(cache.latents, entry)
        yield engine
        self.group.barrier()
        engine.close()

    def entry(self, kv_cache_dtype: str | None = None) -> KVFormat:
        """Of a token in the cache of one layer. None: the configuration's dtype."""
        c, name = self.model.config, kv_cache_dtype or self.config.kv_cache_dtype
        return KVFormat.from_name(name, c.kv_lora_rank, c.qk_rope_head_dim, self.model.kv_dtype)

    def _fill_pages(self, pages: Tensor, entry: KVFormat) -> None:
        """With entries of random numbers."""
        for some in pages.split(PAGES_AT_ONCE):
            values = torch.randn(*some.shape[:2], self.model.config.kv_dim, device=pages.device, dtype=torch.bfloat16)
            some.copy_(entry.encode(values.flatten(0, 1)).view(some.shape))

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

    def decode(self, num_layers: int, settings: DecodeSettings, aheads: Sequence[bool]) -> list["DecodeResult"]:
        """One series for each of `aheads`: whether the host prepares a step while the previous one computes."""
        s, decoded = settings, []
        graph_sizes = (s.rows,) if s.recorded else ()
        shape = num_layers, s.requests, s.rows, s.num_drafts, s.overlap, graph_sizes, s.kv_cache_dtype
        with self.engine(*shape) as engine:
            for ahead in aheads:
                engine.overlap_schedule = ahead and not s.num_drafts
                decoded.append(self._decode_series(engine, s))
        return decoded

    def _decode_series(self, engine: Engine, s: DecodeSettings) -> "DecodeResult":
        """The middle step has work.context cached tokens of each request."""
        w, per_step = self.work, 1 + s.num_drafts
        most_tokens = (s.steps + 2 * WARM_UP) * per_step
        self._fill(engine, s.requests, w.context - s.steps * per_step // 2, max_tokens=most_tokens)
        with only_last_tokens(engine):
            engine.step()
        torch.cuda.synchronize()
        for _ in range(WARM_UP):
            engine.step()
        before_LS = self._slot_load(engine)
        engine.gap.recent_s.clear()
        times = []
        for _ in range(s.steps):
            start = time.perf_counter()
            engine.step()
            times.append(time.perf_counter() - start)
        result = DecodeResult.from_steps(engine, times, self._slot_load(engine) - before_LS, self.group.size)
        for request in list(engine.scheduler.running):
            engine.abort(request.request_id)
        while not engine.step().all_idle:
            pass
        return result

    def _slot_load(self, engine: Engine) -> np.ndarray:
        """int64 [L, S]: tokens of each slot of all ranks so far."""
        torch.cuda.synchronize()
        own_L = np.array(engine.model.expert_load(), dtype=np.int64)
        return np.concatenate(self.group.allgather(own_L), axis=1) if own_L.size else np.zeros((0, self.group.size))

    def _fill(self, engine: Engine, num_requests: int, num_tokens: int, max_tokens: int) -> None:
        rng = np.random.default_rng(self.group.rank)
        params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
        for i in range(num_requests):
            prompt = rng.integers(2, engine.limits.vocab_size, num_tokens).tolist()
            engine.add_request(str(i), prompt, params)


@contextmanager
def cache_of_one_layer() -> Iterator[None]:
    """Engines made meanwhile keep the cache of every layer in the memory of one."""
    allocate = cache_layout.allocate_kv_cache

    def allocate_one(num_layers, *shape_and_kind):
        return allocate(1, *shape_and_kind).expand(num_layers, -1, -1, -1)

    cache_layout.allocate_kv_cache = allocate_one
    yield
    cache_layout.allocate_kv_cache = allocate


@contextmanager
def only_last_tokens(engine: Engine) -> Iterator[None]:
    """Prompts pass for computed but for their last token: what is in the pages already serves as their cache."""
    cut = engine.scheduler._cut_chunk

    def last_token(request, budget, is_first=False):
        request.num_prefilled = max(request.num_prefilled, request.prefill_end - 1)
        return cut(request, budget, is_first)

    engine.scheduler._cut_chunk = last_token
    yield
    engine.scheduler._cut_chunk = cut


@dataclass(frozen=True)
class DecodeResult:
    """The decoding steps of one engine."""

    overlap: str  # none, sbo or tbo
    times_s: list[float]  # of each step
    gaps_s: list[float]  # sorted: how long the GPU waited for the host between two steps
    skew: float  # the busiest expert's tokens over the mean, mean over layers
    rank_skew: float  # the same of ranks

    @staticmethod
    def from_steps(engine: Engine, times_s: list[float], load_LS: np.ndarray, num_ranks: int) -> "DecodeResult":
        """load_LS: tokens of each slot of all ranks meanwhile."""
        skew = rank_skew = 1.0
        if load_LS.size:
            load_LE = np.stack([by_expert(moe, row_S) for moe, row_S in zip(engine.model.moe_layers(), load_LS)])
            skew = max_over_mean(load_LE)
            rank_skew = max_over_mean(load_LS.reshape(len(load_LS), num_ranks, -1).sum(axis=2))
        return DecodeResult(engine.overlap.decode, times_s, sorted(engine.gap.recent_s), skew, rank_skew)

    @property
    def timing(self) -> Timing:
        return Timing.from_samples(self.times_s)

    @property
    def mean_s(self) -> float:
        return statistics.fmean(self.times_s)

    def gap_us(self, q: float) -> float | None:
        return quantile(self.gaps_s, q) * 1e6 if self.gaps_s else None


def by_expert(moe: EPMoE, load_S: np.ndarray) -> np.ndarray:
    """The load of each logical expert, of that of its slots."""
    expert_S = moe.slot_map.expert_of_slot_S.numpy()
    return np.bincount(expert_S[expert_S >= 0], load_S[expert_S >= 0], minlength=moe.config.num_experts)
