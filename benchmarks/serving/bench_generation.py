"""Generation at the shape of DeepSeek-V3, dummy weights: tokens per second and GPU, latency, the host's share.

    mpirun -n 2 python -m benchmarks.serving.bench_generation --experts 32    # 16 a GPU, as on 16 GPUs: all layers fit
    mpirun -n 2 python -m benchmarks.serving.bench_generation --experts 64 --one-cache --chunk 0    # 32 a GPU, as on 8
    mpirun -n 2 python -m benchmarks.serving.bench_generation --layers 20     # all 256 experts on the GPUs there are

prefill   prompts of --input tokens, in steps of --chunk; --chunk 0: none
decode    steps with so many requests per GPU, each in the middle of its output: context --input + --output / 2. Their
          cache entries are random numbers, not computed. ahead: the host prepares each step while the one before
          computes; without for the first number of requests only
at --itl  tokens per second at that latency per token, by a straight line between the nearest two measurements
drafts    the same with one draft by the MTP layer. Measured is the step. Of random weights' drafts none hold, so that
          itl_ms and tokens_per_s_gpu are what they would be if a share of --acceptance did: by default the lower end of
          what DeepSeek published for V3's own layer, 85 to 90 % (arXiv:2412.19437, 5.4.3). bench_drafts measures one

With 32 of 256 experts on a GPU and all choices among 64, an expert gets as many rows as on 8 GPUs, weights and cache
are those of one of them; only rows to and from 2 GPUs in place of 8 differ (of a token's 8, half leave, not 7/8).
--one-cache: all layers keep their cache in the same memory, for weights that leave no room for 61. At 128 requests it
is 12 times the L2 cache, so that every layer reads it from HBM, as it would its own.
Fewer than 61 layers are measured at two depths; a MoE layer's time is their difference, and 61 layers are the time
measured plus that of the layers that lack. floor: bytes of weights and cache that a step must read over measured HBM
bandwidth, and rows to and from other GPUs over NVLink's. floor_tensor: the same, but attention takes the time of its
bf16 operations, at the rate of a large product, where that is longer: 128 heads share every entry. gap: how long a GPU
waited for its host between two steps, by CUDA events.
Published, 4K in / 1.5K out or alike: 800-850 output tokens/s per GPU (H20, EP16/32), 1850 (H800, EP144), both at up to
50 ms; prefill 5333 input tokens/s per GPU (H800, EP32).
"""

import argparse
import gc
import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from benchmarks.gpu.bench_gpu_layers import bandwidth, matrix_rate
from benchmarks.shapes import DEEPSEEK_V3
from benchmarks.tools.report import BenchmarkReport
from benchmarks.tools.timing import Timing, quantile
from eprt import EngineConfig, EPGroup, SamplingParams
from eprt.engine import kv_cache
from eprt.engine.engine import Engine
from eprt.models.loader import load_model

NUM_RANKS = 2
NEEDS_GPU = True

FULL_DEPTH, WARM_UP = 61, 6
NVLINK_BYTES_PER_S = 450e9  # of one GPU, one way, NVLink 4


@dataclass(frozen=True)
class GenerationWorkload:
    """input, output: tokens of a request. chunk: tokens of a prefill step. one_cache: for all layers."""

    input: int
    output: int
    chunk: int
    steps: int
    one_cache: bool

    @property
    def context(self) -> int:
        return self.input + self.output // 2

    @property
    def max_model_len(self) -> int:
        return self.context + self.steps + 2 * WARM_UP + 64


@contextmanager
def shape_with(num_experts: int) -> Iterator[Path]:
    """DeepSeek-V3's config.json with so many experts."""
    config = json.loads((DEEPSEEK_V3 / "config.json").read_text())
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps({**config, "n_routed_experts": num_experts}))
        yield Path(folder)


def of_depth(model, num_layers: int):
    """The model's first layers: shares all weights with it."""
    shallow = object.__new__(type(model))
    shallow.__dict__.update(model.__dict__)
    shallow.layers = model.layers[:num_layers]
    shallow.config = replace(model.config, num_hidden_layers=num_layers)
    return shallow


@contextmanager
def cache_of_one_layer() -> Iterator[None]:
    """Engines made meanwhile keep the cache of every layer in the memory of one."""
    allocate = kv_cache.allocate_kv_cache

    def allocate_one(num_layers, *shape_and_kind):
        return allocate(1, *shape_and_kind).expand(num_layers, -1, -1, -1)

    kv_cache.allocate_kv_cache = allocate_one
    yield
    kv_cache.allocate_kv_cache = allocate


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
    """overlap: of the steps. times_s: theirs. gaps_s: sorted. skew: the busiest expert of this rank over its mean."""

    overlap: str
    times_s: list[float]
    gaps_s: list[float]
    skew: float

    @staticmethod
    def of(engine: Engine, times_s: list[float], load_before: list[list[int]]) -> "DecodeResult":
        torch.cuda.synchronize()
        load = np.array(engine.model.expert_load()) - np.array(load_before)
        skew = float((load.max(axis=1) / load.mean(axis=1).clip(1e-9)).mean()) if load.size else 1.0
        return DecodeResult(engine.overlap.decode, times_s, sorted(engine.gap.recent_s), skew)

    @property
    def timing(self) -> Timing:
        return Timing.from_samples(self.times_s)

    def gap_us(self, q: float) -> float | None:
        return quantile(self.gaps_s, q) * 1e6 if self.gaps_s else None


def full_depth(seconds: float, shallower_s: float | None, num_layers: int, fewer: int) -> float:
    """What 61 layers would take, of two measured depths."""
    if shallower_s is None:
        return seconds
    return seconds + (FULL_DEPTH - num_layers) * (seconds - shallower_s) / fewer


@dataclass(frozen=True)
class GpuRates:
    """What this GPU does: bytes per second of HBM, bf16 operations per second of a large product."""

    hbm: float
    tensor: float


def floor_seconds(model, requests: int, context: int, num_ranks: int, rates: GpuRates) -> tuple[float, float]:
    """(floor, floor_tensor) of a decoding step on one rank: every weight once, of the experts those that uniform
    routing chooses."""
    c = model.config
    heads, moe = c.num_attention_heads, c.moe
    projections = c.hidden_size * (c.q_lora_rank + c.kv_dim) + c.q_lora_rank * heads * c.qk_head_dim
    projections += heads * c.v_head_dim * c.hidden_size
    absorbed = 2 * heads * (c.qk_nope_head_dim + c.v_head_dim) * c.kv_lora_rank  # bf16
    chosen = 1 - (1 - moe.top_k / moe.num_experts) ** (requests * num_ranks)
    experts = 3 * c.hidden_size * moe.intermediate_size * chosen * moe.num_experts / num_ranks
    shared = 3 * c.hidden_size * moe.shared_intermediate_size
    num_dense = c.first_k_dense_replace
    num_moe = c.num_hidden_layers - num_dense
    weights = c.num_hidden_layers * (projections + absorbed) + num_dense * 3 * c.hidden_size * c.intermediate_size
    weights += num_moe * (experts + shared) + 2 * c.vocab_size * c.hidden_size
    entries = c.num_hidden_layers * requests * context
    sent_rows = requests * moe.top_k * (num_ranks - 1) / num_ranks
    exchanged = num_moe * sent_rows * c.hidden_size * (1 + 4 / 128 + 2)  # e4m3 with scales there, bf16 back
    cache_s = entries * c.kv_dim * 2 / rates.hbm
    attention_s = entries * 2 * heads * (c.kv_dim + c.kv_lora_rank) / rates.tensor
    rest_s = weights / rates.hbm + exchanged / NVLINK_BYTES_PER_S
    return rest_s + cache_s, rest_s + max(cache_s, attention_s)


def decode_kernel(model, page_size: int) -> str:
    """Which kernel attends decodes here."""
    from eprt.ops.cuda import attention

    c, kind = model.config, {"dtype": model.kv_dtype, "device": "cuda"}
    q, pages = torch.empty(1, c.num_attention_heads, c.kv_dim, **kind), torch.empty(1, page_size, c.kv_dim, **kind)
    module = attention.kernel(q[..., : c.kv_lora_rank], q[..., c.kv_lora_rank :], pages, None)
    return module.__name__.rpartition("_")[2]


class GenerationTable:
    """Rows of the report, from the benchmark's steps."""

    def __init__(self, bench: GenerationBench, report: BenchmarkReport, num_layers: int, acceptance: float):
        self.bench, self.report, self.num_layers, self.acceptance = bench, report, num_layers, acceptance
        self.rates = GpuRates(bandwidth(), matrix_rate())
        self.fewer = 0 if num_layers == FULL_DEPTH else num_layers // 2
        self.itl_s: dict[int, float] = {}  # by requests

    def prefill(self) -> None:
        bench, fewer = self.bench, self.fewer
        chunk, num_prompts = bench.work.chunk, 4 * -(-bench.work.chunk // bench.work.input)
        seconds = bench.prefill(self.num_layers, num_prompts)
        shallower_s = bench.prefill(self.num_layers - fewer, num_prompts) if fewer else None
        full_s = full_depth(seconds, shallower_s, self.num_layers, fewer)
        self.report.add_row(
            what="prefill",
            tokens=chunk,
            step_ms=seconds * 1e3,
            full_step_ms=full_s * 1e3,
            tokens_per_s_gpu=chunk / full_s,
            of_5333=chunk / full_s / 5333,
        )

    def decode(self, requests: int, aheads: Sequence[bool], num_drafts: int = 0, overlap: str = "auto") -> None:
        bench, fewer = self.bench, self.fewer
        results = bench.decode(self.num_layers, requests, aheads, num_drafts, overlap)
        shallower_s: list[float | None] = [None] * len(aheads)
        if fewer:
            shallower = bench.decode(self.num_layers - fewer, requests, aheads, num_drafts, overlap)
            shallower_s = [decoded.timing.median_s for decoded in shallower]
        for ahead, result, less_s in zip(aheads, results, shallower_s):
            full_s = full_depth(result.timing.median_s, less_s, self.num_layers, fewer)
            per_step = 1 + num_drafts * self.acceptance
            floors = floor_seconds(bench.model, requests, bench.work.context, bench.group.size, self.rates)
            if not num_drafts:
                self.itl_s[requests] = min(full_s, self.itl_s.get(requests, full_s))
            self.report.add_row(
                what="drafts" if num_drafts else "decode",
                requests=requests,
                overlap=result.overlap,
                ahead=ahead and not num_drafts,
                **result.timing.columns("step", "ms"),
                floor_ms=floors[0] * 1e3,
                floor_tensor_ms=floors[1] * 1e3,
                times_floor=None if num_drafts else result.timing.median_s / floors[0],
                full_step_ms=full_s * 1e3,
                itl_ms=full_s * 1e3 / per_step,
                tokens_per_s_gpu=requests * per_step / full_s,
                gap_us=result.gap_us(0.5),
                gap_p99_us=result.gap_us(0.99),
                skew=result.skew,
            )

    def at_latency(self, itl_s: float) -> None:
        """Between the two numbers of requests that are below and above it."""
        below = max((n for n, s in self.itl_s.items() if s <= itl_s), default=None)
        above = min((n for n, s in self.itl_s.items() if s > itl_s), default=None)
        if below is None or above is None or below > above:
            return
        part = (itl_s - self.itl_s[below]) / (self.itl_s[above] - self.itl_s[below])
        requests = int(below + part * (above - below))
        self.report.add_row(
            what=f"at {itl_s * 1e3:g} ms", requests=requests, itl_ms=itl_s * 1e3, tokens_per_s_gpu=requests / itl_s
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--experts", type=int, default=256, help="of all GPUs together, per layer")
    add("--layers", type=int, default=FULL_DEPTH)
    add("--requests", type=int, nargs="+", default=[64, 96, 128], help="per GPU")
    add("--input", type=int, default=4096)
    add("--output", type=int, default=1536)
    add("--chunk", type=int, default=8192)
    add("--steps", type=int, default=30)
    add("--drafts", action="store_true", help="also with one draft per step")
    add("--acceptance", type=float, default=0.85, help="share of drafts that hold, measured elsewhere: %(default)s")
    add("--overlap", nargs="+", default=["auto"], help="of decodes: auto, none, sbo, tbo; several are compared")
    add("--one-cache", action="store_true", help="all layers keep their cache in one layer's memory")
    add("--itl", type=float, default=50.0, help="ms per token at which throughput is told")
    args = parser.parse_args()
    group = EPGroup.from_mpi()
    work = GenerationWorkload(args.input, args.output, args.chunk, args.steps, args.one_cache)
    with shape_with(args.experts) as directory:
        config = EngineConfig(
            str(directory),
            device="cuda",
            dtype="bfloat16",
            load_format="dummy",
            num_hidden_layers=args.layers,
            low_latency_max_tokens=max(args.requests) * (1 + args.drafts),
            max_model_len=work.max_model_len,
            num_speculative_tokens=int(args.drafts),
            enable_prefix_cache=False,
            ep_payload="fp8",
            chunk_size=max(args.chunk, max(args.requests) * (1 + args.drafts)),
            max_num_seqs=max(args.requests),
            page_size=64,
            max_queue=1 << 20,
            spare_experts=0,
        )
        bench = GenerationBench(config, group, work)
    title = f"generation_{args.layers}x{args.experts}_{group.size}gpu"
    report = BenchmarkReport(
        title,
        {
            "device": torch.cuda.get_device_name(),
            "gpus": group.size,
            "experts": args.experts,
            "layers": args.layers,
            "attention": decode_kernel(bench.model, config.page_size),
            "one_cache": args.one_cache,
            "input": args.input,
            "output": args.output,
            "context": work.context,
            "acceptance_published": args.acceptance if args.drafts else None,
            "load_s": round(bench.load_s, 1),
        },
    )
    measuring = GenerationTable(bench, report, args.layers, args.acceptance)
    for requests in args.requests:
        for overlap in args.overlap:
            aheads = (True, False) if requests == args.requests[0] and overlap == args.overlap[0] else (True,)
            measuring.decode(requests, aheads, overlap=overlap)
    measuring.at_latency(args.itl / 1e3)
    for requests in args.requests if args.drafts else ():
        measuring.decode(requests, (True,), num_drafts=1)
    if args.chunk:
        measuring.prefill()
    if group.rank == 0:
        report.finish()
    bench.model.close()
    group.close()


if __name__ == "__main__":
    main()
