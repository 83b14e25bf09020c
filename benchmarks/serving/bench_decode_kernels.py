"""Where a decoding step of DeepSeek-V3 goes: every kernel of a MoE layer and its time, as CUPTI sees it.

    mpirun -n 2 python -m benchmarks.serving.bench_decode_kernels --experts 32    # on each GPU: as on 8
    python -m benchmarks.serving.bench_decode_kernels                             # 16, as on 16; one GPU sends nothing

A recorded step of --layers layers, dummy weights, each request with --context tokens of random cache. A layer is the
difference between this depth and one of three layers fewer.

    layer      by events, without the profiler, of the slowest GPU
    kernels    of the first GPU; they may overlap each other (--overlap sbo), and those of the exchange wait for the
               other GPUs
    between    layer less the sum of its kernels: negative where kernels overlap
    --gaps     the kernels of a layer in the order in which they start, and how long no kernel ran before each: medians
               over layers and replays. Each gap above 2 us is a row of the results
"""

import argparse
import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from benchmarks.gpu.graph_timer import bandwidth, gpu_time_of_replay, matrix_rate
from benchmarks.gpu.random_inputs import decode_batch
from benchmarks.serving.dummy_model import of_depth, shape_with
from benchmarks.serving.floors import GpuRates, floor_seconds
from benchmarks.tools.report import BenchmarkReport
from eprt import EngineConfig, EPGroup
from eprt.engine.graphs import DecodeGraphs, padding_rows
from eprt.layers.layer_cache import LayerCache
from eprt.models.loader import load_model

NUM_RANKS = 2
NEEDS_GPU = True
PAGE_SIZE, FEWER, REPLAYS = 64, 3, 5
LAST_OF_LAYER = "_add_rows"
LONG_GAP_US = 2.0


@dataclass(frozen=True)
class StepProfile:
    """One decoding step."""

    step_s: float  # by events, without the profiler
    kernels: dict[str, tuple[float, float]]  # name -> (calls, seconds), in the order of the first call
    sequence: list["KernelRun"]  # of a layer


def profile(graphs: DecodeGraphs, batch) -> StepProfile:
    step_s = gpu_time_of_replay(graphs, batch).median_s
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(REPLAYS):
            graphs.run(batch)
        torch.cuda.synchronize()
    events = [event for event in profiler.events() or () if event.device_type == torch.autograd.DeviceType.CUDA]
    spans = sorted((e.time_range.start, e.time_range.end, short_name(e.name)) for e in events)
    calls, seconds = defaultdict(float), defaultdict(float)
    for begin_us, end_us, name in spans:
        calls[name] += 1 / REPLAYS
        seconds[name] += (end_us - begin_us) / 1e6 / REPLAYS
    return StepProfile(step_s, {name: (calls[name], seconds[name]) for name in calls}, layer_sequence(spans))


@dataclass(frozen=True)
class KernelRun:
    """A kernel at its place in a layer: medians over layers and replays."""

    name: str
    us: float
    gap_us: float  # before it, in which no kernel ran


def layer_sequence(spans: Sequence[tuple[float, float, str]]) -> list[KernelRun]:
    """Of the layers whose kernels are those of most layers. spans: (begin, end, name), sorted, us."""
    layers: list[list[tuple[str, float, float]]] = [[]]  # (name, us, us before it in which no kernel ran)
    busy_until = spans[0][0] if spans else 0.0
    for begin, end, name in spans:
        layers[-1].append((name, end - begin, max(0.0, begin - busy_until)))
        busy_until = max(busy_until, end)
        if name == LAST_OF_LAYER:
            layers.append([])
    names = [tuple(name for name, *_ in layer) for layer in layers]
    (usual, _), *_ = Counter(names).most_common(1)
    chosen = [layer for layer, its_names in zip(layers, names) if its_names == usual]
    return [
        KernelRun(
            name, statistics.median(layer[i][1] for layer in chosen), statistics.median(layer[i][2] for layer in chosen)
        )
        for i, name in enumerate(usual)
    ]


def short_name(name: str) -> str:
    """Without return type, namespaces, parameters and template arguments; of torch's kernels, with what they apply."""
    applied = re.search(r"(direct_copy|index\w*kernel|[A-Za-z]*Functor_?[a-z]*|\w+_kernel_cuda)", name)
    plain = re.split(r"[<(]", re.sub(r"^void ", "", name).replace("(anonymous namespace)", ""))[0].split("::")[-1]
    return f"{plain} {applied[0]}"[:60] if applied and "elementwise" in plain else plain[:60]


class LayerProfiler:
    """A model on all ranks, of which layers are profiled."""

    def __init__(self, model, group: EPGroup, context: int, gaps: bool):
        self.model, self.group, self.context, self.gaps = model, group, context, gaps
        self.num_pages, self.rates = -(-context // PAGE_SIZE), GpuRates(bandwidth(), matrix_rate())

    def report(self, report: BenchmarkReport, requests: int, overlap: str) -> None:
        layers, row = self.model.config.num_hidden_layers, {"requests": requests, "overlap": overlap}
        deep, shallow = (self._profile(depth, requests, overlap) for depth in (layers, layers - FEWER))
        floors = [
            floor_seconds(of_depth(self.model, depth), requests, self.context, self.group.size, self.rates)[0]
            for depth in (layers, layers - FEWER)
        ]
        layer_s, floor_s, kernels_s = (deep.step_s - shallow.step_s) / FEWER, (floors[0] - floors[1]) / FEWER, 0.0
        for name, (calls, seconds) in deep.kernels.items():
            fewer_calls, fewer_s = shallow.kernels.get(name, (0.0, 0.0))
            if calls - fewer_calls > 0.5:
                kernels_s += (seconds - fewer_s) / FEWER
                times = {"calls": (calls - fewer_calls) / FEWER, "layer_us": (seconds - fewer_s) / FEWER * 1e6}
                report.add_row(**row, kernel=name, **times)
        report.add_row(**row, kernel="= kernels of a layer", layer_us=kernels_s * 1e6)
        report.add_row(**row, kernel="= between", layer_us=(layer_s - kernels_s) * 1e6)
        for run in deep.sequence if self.gaps else ():
            if run.gap_us > LONG_GAP_US:
                report.add_row(**row, kernel=f"before {run.name}", gap_us=run.gap_us)
        ratio = {"floor_us": floor_s * 1e6, "times_floor": layer_s / floor_s}
        report.add_row(**row, kernel="= layer", layer_us=layer_s * 1e6, **ratio)
        if self.gaps and self.group.rank == 0:
            print(f"\n{requests} requests, {overlap}: kernels of a layer in order, us, and the gap before each")
            print("\n".join(f"{run.us:8.1f} {run.gap_us:6.1f}  {run.name}" for run in deep.sequence), flush=True)

    def _profile(self, num_layers: int, requests: int, overlap: str) -> StepProfile:
        """Of a step through the model's first layers."""
        c, num_cached = self.model.config, requests * self.num_pages + 1
        shape = num_layers, num_cached, PAGE_SIZE, c.kv_dim
        cache_L = [LayerCache(x) for x in torch.randn(shape, device="cuda", dtype=torch.bfloat16)]
        part = of_depth(self.model, num_layers)
        with torch.inference_mode():
            padding = padding_rows(requests, self.num_pages, PAGE_SIZE, num_cached - 1, self.model.device, overlap)
            graphs = DecodeGraphs(lambda batch: part.forward_with_hidden(batch, cache_L), [requests], padding)
            graphs.compute_all()
            graphs.record()
            mine = profile(graphs, decode_batch(requests, self.num_pages, PAGE_SIZE, c.vocab_size))
        return replace(mine, step_s=max(self.group.allgather(mine.step_s)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--experts", type=int, default=16, help="on each GPU")
    parser.add_argument("--requests", type=int, nargs="+", default=[64, 128], help="of each GPU")
    parser.add_argument("--context", type=int, default=4864)
    parser.add_argument("--overlap", nargs="+", default=["none"], help="none, sbo or tbo; several are compared")
    parser.add_argument("--gaps", action="store_true", help="also the gaps between the kernels of a layer")
    args = parser.parse_args()
    group = EPGroup.from_mpi()
    with shape_with(args.experts * group.size) as directory:
        config = EngineConfig(
            str(directory),
            device="cuda",
            load_format="dummy",
            num_hidden_layers=args.layers,
            ep_payload="fp8",
            low_latency_max_tokens=max(args.requests),
            max_model_len=args.context + PAGE_SIZE,
        )
        model = load_model(config, group)
    report = BenchmarkReport(
        f"decode_kernels_{group.size}gpu",
        {
            "device": torch.cuda.get_device_name(),
            "gpus": group.size,
            "experts_per_gpu": args.experts,
            "layers": args.layers,
            "context": args.context,
        },
    )
    layers = LayerProfiler(model, group, args.context, args.gaps)
    for requests in args.requests:
        for overlap in args.overlap:
            layers.report(report, requests, overlap)
    if group.rank == 0:
        report.finish()
    model.close()
    group.close()


if __name__ == "__main__":
    main()
