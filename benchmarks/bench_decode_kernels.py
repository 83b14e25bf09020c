"""Where a decoding step of DeepSeek-V3 goes: every kernel of a layer and its time, as CUPTI sees it, on one GPU.

A recorded step of --layers layers with --experts experts on this GPU (16: as on 16 GPUs), dummy weights, each request
with --context tokens of random cache. A MoE layer is the difference between this depth and one of three layers fewer.
step: by events, without the profiler. between: what of it no kernel fills.
"""

import argparse
import re
from collections import defaultdict
from dataclasses import dataclass

import torch

from benchmarks.bench_generation import of_depth, shape_with
from benchmarks.bench_gpu_layers import bandwidth, decode_batch, gpu_time_of_replay, step_bytes
from benchmarks.report import Report
from eprt import EngineConfig, EPGroup
from eprt.engine.graphs import DecodeGraphs, padding_rows
from eprt.gpu.device import take_device
from eprt.models.loader import load_model

NUM_RANKS = 0
NEEDS_GPU = True
PAGE_SIZE, FEWER, REPLAYS = 64, 3, 5


@dataclass(frozen=True)
class Profile:
    """Of one step. kernels: name -> (calls, seconds), in the order of their first call."""

    step_s: float
    kernels: dict[str, tuple[float, float]]


def profile(graphs: DecodeGraphs, batch) -> Profile:
    step_s = gpu_time_of_replay(graphs, batch).median_s
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(REPLAYS):
            graphs.run(batch)
        torch.cuda.synchronize()
    events = [event for event in profiler.events() or () if event.device_type == torch.autograd.DeviceType.CUDA]
    calls, seconds = defaultdict(float), defaultdict(float)
    for event in sorted(events, key=lambda event: event.time_range.start):
        name = short_name(event.name)
        calls[name] += 1 / REPLAYS
        seconds[name] += event.time_range.elapsed_us() / 1e6 / REPLAYS
    return Profile(step_s, {name: (calls[name], seconds[name]) for name in calls})


def short_name(name: str) -> str:
    """Without return type, namespaces, parameters and template arguments; of torch's kernels, with what they apply."""
    applied = re.search(r"(direct_copy|index\w*kernel|[A-Za-z]*Functor_?[a-z]*|\w+_kernel_cuda)", name)
    plain = re.split(r"[<(]", re.sub(r"^void ", "", name).replace("(anonymous namespace)", ""))[0].split("::")[-1]
    return f"{plain} {applied[0]}"[:60] if applied and "elementwise" in plain else plain[:60]


def at_depth(model, num_layers: int, requests: int, num_pages: int, hbm: float) -> tuple[Profile, float]:
    """Of the model's first layers: (profile, floor in seconds)."""
    part, num_cached = of_depth(model, num_layers), requests * num_pages + 1
    cache = torch.randn(
        num_layers, num_cached, PAGE_SIZE, model.config.kv_dim, device="cuda", dtype=torch.bfloat16
    )  # fmt: skip
    with torch.inference_mode():
        padding = padding_rows(requests, num_pages, PAGE_SIZE, num_cached - 1, cache.device)
        graphs = DecodeGraphs(lambda batch: part.forward_with_hidden(batch, cache), [requests], padding)
        batch = decode_batch(requests, num_pages, PAGE_SIZE, model.config.vocab_size)
        return profile(graphs, batch), step_bytes(part, cache, requests, num_pages) / hbm


def measure(report: Report, model, requests: int, context: int, hbm: float) -> None:
    num_pages = -(-context // PAGE_SIZE)
    layers = model.config.num_hidden_layers
    deep, deep_floor_s = at_depth(model, layers, requests, num_pages, hbm)
    shallow, shallow_floor_s = at_depth(model, layers - FEWER, requests, num_pages, hbm)
    layer_s, floor_s, kernels_s = (deep.step_s - shallow.step_s) / FEWER, (deep_floor_s - shallow_floor_s) / FEWER, 0.0
    for name, (calls, seconds) in deep.kernels.items():
        fewer_calls, fewer_s = shallow.kernels.get(name, (0.0, 0.0))
        if calls - fewer_calls > 0.5:
            kernels_s += (seconds - fewer_s) / FEWER
            times = {"calls": (calls - fewer_calls) / FEWER, "layer_us": (seconds - fewer_s) / FEWER * 1e6}
            report.row(requests=requests, kernel=name, **times)
    report.row(requests=requests, kernel="= kernels of a layer", layer_us=kernels_s * 1e6)
    report.row(requests=requests, kernel="= between", layer_us=(layer_s - kernels_s) * 1e6)
    report.row(
        requests=requests,
        kernel="= layer",
        layer_us=layer_s * 1e6,
        floor_us=floor_s * 1e6,
        times_floor=layer_s / floor_s,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument("--requests", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--context", type=int, default=4864)
    args = parser.parse_args()
    group = EPGroup.single()
    take_device("cuda", group)
    with shape_with(args.experts) as directory:
        config = EngineConfig(
            str(directory), device="cuda", load_format="dummy", num_hidden_layers=args.layers, ep_payload="fp8",
            low_latency_max_tokens=max(args.requests), max_model_len=args.context + PAGE_SIZE,
        )  # fmt: skip
        model = load_model(config, group)
    described = {"device": torch.cuda.get_device_name(), "experts": args.experts, "context": args.context}
    report = Report("decode_kernels", described)
    hbm = bandwidth()
    for requests in args.requests:
        measure(report, model, requests, args.context, hbm)
    report.finish()
    model.close()


if __name__ == "__main__":
    main()
