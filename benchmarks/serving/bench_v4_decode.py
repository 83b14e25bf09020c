"""A decoding step at DeepSeek-V4-Flash's shape, dummy weights, fp4 experts: its time beside the bytes that it reads.

    python -m benchmarks.serving.bench_v4_decode                        # one GPU, as one of 4: 64 of the 256 experts
    mpirun -n 2 python -m benchmarks.serving.bench_v4_decode            # 2 GPUs, as 2 of 4

All 43 layers, recorded as in service, without sampling. Each request has a context of random cache in every layer.
With --experts-per-gpu 64 and all choices among the experts that are there, an expert gets as many rows as on 4
GPUs; weights and cache are those of one of 4. Only the exchange differs: one GPU sends nothing, of two a token's rows
leave for one other GPU instead of three.

step_ms    by events, the median, of the slowest GPU
floor_ms   weights, of routed experts those that some token is expected to choose, and what a query reads of the cache,
           divided by the measured bandwidth
--profile  prints the kernels that take most of the step
"""

import argparse
import json
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.gpu.graph_timer import bandwidth, gpu_time_of_replay
from benchmarks.shapes import DEEPSEEK_V4_FLASH
from benchmarks.tools.report import BenchmarkReport
from eprt import EngineConfig, EPGroup
from eprt.engine.graphs import DecodeGraphs, padding_rows
from eprt.engine.memory_plan import MemoryPlan
from eprt.layers.batch import ForwardBatch
from eprt.layers.hybrid_cache import PAGE_TOKENS, HybridLayout
from eprt.models.deepseek_v4 import DeepseekV4Model
from eprt.models.loader import load_model

NUM_RANKS = 1
NEEDS_GPU = True
TOP_KERNELS = 30
CASES = [(1, 8192), (16, 8192), (64, 8192), (1, 131072), (16, 131072)]  # requests, tokens of context


def sizes(text: str) -> tuple[int, int]:
    requests, context = map(int, text.split("x"))
    return requests, context


@contextmanager
def flash_with(num_experts: int) -> Iterator[Path]:
    """V4-Flash's config.json with so many experts."""
    config = json.loads((DEEPSEEK_V4_FLASH / "config.json").read_text())
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps({**config, "n_routed_experts": num_experts}))
        yield Path(folder)


class DecodeBench:
    """One rank's model, and a cache for the most requests."""

    def __init__(self, args: argparse.Namespace, group: EPGroup):
        self.args, self.group, most = args, group, max(requests for requests, _ in args.cases)
        with flash_with(args.experts_per_gpu * group.size) as directory:
            config = EngineConfig(
                str(directory),
                device="cuda",
                dtype="bfloat16",
                load_format="dummy",
                num_hidden_layers=args.layers,
                low_latency_max_tokens=most,
                max_model_len=2 * max(context for _, context in args.cases),
                chunk_size=max(512, most),
                max_num_seqs=most,
                kv_cache_dtype=args.kv_cache_dtype,
                index_cache_dtype=args.index_cache_dtype,
            )
            model = load_model(config, group)
            gpu_bytes = torch.cuda.get_device_properties(model.device).total_memory
            self.plan = MemoryPlan.for_rank(config, group.size, device="cuda", gpu_bytes=gpu_bytes)
        assert isinstance(model, DeepseekV4Model) and model.config.v4 is not None
        self.model, self.v4 = model, model.config.v4
        dtype = torch.uint8 if args.kv_cache_dtype == "fp8" else torch.bfloat16
        ratios = self.v4.compress_ratios[: args.layers]
        self.layout = HybridLayout.for_model(model.config, ratios, dtype, args.index_cache_dtype)
        num_pages = max(requests * self._pages_each(context) for requests, context in args.cases) + 1
        memory_PB = torch.empty(num_pages, self.layout.page_bytes, dtype=torch.uint8, device="cuda")
        memory_PB.view(torch.bfloat16).normal_()
        if args.kv_cache_dtype == "fp8":
            memory_PB.fill_(0x30)  # finite in every format
        self.layers, self.bandwidth = self.layout.layers(memory_PB), bandwidth()

    def _pages_each(self, context: int) -> int:
        """Of one request, its tail included."""
        return -(-(context + 1) // PAGE_TOKENS) + self.layout.tail.num_pages

    def batch(self, requests: int, context: int) -> ForwardBatch:
        num_tail, device = self.layout.tail.num_pages, self.model.device
        num_context = self._pages_each(context) - num_tail
        padding = padding_rows(
            requests, num_context, PAGE_TOKENS, self.layers[0].padding_page, device, num_tail=num_tail
        )
        pages = torch.randperm(requests * self._pages_each(context), device=device).int().view(requests, -1)
        position_T = torch.full((requests,), context, device=device)
        return replace(
            padding,
            token_id_T=torch.randint(self.model.config.vocab_size, (requests,), device=device),
            position_T=position_T,
            seq_len_B=(position_T + 1).int(),
            page_table_BP=pages[:, :num_context],
            tail_BF=pages[:, num_context:],
            longest=context + 1,
        )

    def compute(self, batch: ForwardBatch) -> tuple[torch.Tensor, ...]:
        return (self.model.forward(batch, self.layers),)

    @torch.inference_mode()
    def step_s(self, requests: int, context: int) -> float:
        batch = self.batch(requests, context)
        graphs = DecodeGraphs(self.compute, [requests], replace(batch, longest=None))
        with self.model.exchange.while_setting_up():
            graphs.compute_all()
            torch.cuda.synchronize()
        graphs.record()
        self.group.barrier()
        timing = gpu_time_of_replay(graphs, batch)
        if self.args.profile and self.group.rank == 0:
            tell_kernels(graphs, batch)
        elif self.args.profile:
            for _ in range(3):
                graphs.run(batch)
        torch.cuda.synchronize()
        return max(self.group.allgather(timing.median_s))

    def floor_s(self, requests: int, context: int) -> float:
        """Of this rank's bytes."""
        moe, rows = self.model.config.moe, requests * self.group.size
        assert moe is not None
        chosen = 1 - (1 - moe.top_k / moe.num_experts) ** rows
        embedded = self.model.embed_VH.numel() * self.model.embed_VH.element_size()  # of which a step reads a few rows
        weights = self.plan.dense - embedded + chosen * self.plan.experts
        return (weights + requests * self._cache_bytes(context)) / self.bandwidth

    def _cache_bytes(self, context: int) -> int:
        """That one query reads."""
        entry, key = (each.width * each.dtype.itemsize for each in (self.layout.entry, self.layout.index))
        total = 0
        for ratio in self.layout.ratios:
            entries = context // ratio if ratio else 0
            total += (128 + min(entries, self.v4.index_topk if ratio == 4 else entries)) * entry
            total += entries * key if ratio == 4 else 0
        return total


def tell_kernels(graphs: DecodeGraphs, batch: ForwardBatch) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(3):
            graphs.run(batch)
        torch.cuda.synchronize()
    calls, took = Counter[str](), Counter[str]()
    for event in profiler.events() or ():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            calls[event.name] += 1
            took[event.name] += event.time_range.elapsed_us()
    total = sum(took.values())
    print(f"{batch.num_tokens} rows: kernels {total / 3e3:.2f} ms a step, {sum(calls.values()) / 3:.0f} launches")
    for name, micros in took.most_common(TOP_KERNELS):
        print(
            f"  {micros / 3e3:8.3f} ms {calls[name] / 3:6.0f} x {micros / calls[name]:7.1f} us  {name[:90]}", flush=True
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--cases", type=sizes, nargs="+", default=CASES, metavar="RxC", help="requests of a GPU x tokens of context")
    add("--layers", type=int, default=43)
    add("--experts-per-gpu", type=int, default=64)
    add("--kv-cache-dtype", default="auto", choices=("auto", "fp8"), help="auto: bf16")
    add("--index-cache-dtype", default="auto", choices=("auto", "fp4"))
    add("--profile", action="store_true")
    args, group = parser.parse_args(), EPGroup.from_mpi()
    bench = DecodeBench(args, group)
    facts = {"device": torch.cuda.get_device_name(), "gpus": group.size} | vars(args)
    name = f"v4_decode_{args.layers}x{args.experts_per_gpu}_{group.size}gpu"
    name += "".join(f"_{each}" for each in (args.kv_cache_dtype, args.index_cache_dtype) if each != "auto")
    report = BenchmarkReport(name, facts)
    for requests, context in args.cases:
        step_s, floor_s = bench.step_s(requests, context), bench.floor_s(requests, context)
        report.add_row(
            what=f"{requests} x {context}",
            requests=requests,
            context=context,
            step_ms=step_s * 1e3,
            floor_ms=floor_s * 1e3,
            times_floor=step_s / floor_s,
            tokens_per_s_gpu=requests / step_s,
        )
        if group.rank == 0:
            report.finish()
    bench.model.close()
    group.close()


if __name__ == "__main__":
    main()
