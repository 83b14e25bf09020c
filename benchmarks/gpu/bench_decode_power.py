"""What the kernels of a decoding layer of DeepSeek-V3 draw: a GPU at its power limit pays for joules, not for time.

    python -m benchmarks.gpu.bench_decode_power --requests 128

Each kernel by itself, again and again for --seconds, on data that is too large for the L2 cache: the time of a call
after a pause (at full clocks) and in the long run, power, clock, and joules of all its calls in a layer. At the limit a
layer takes the sum of its joules over the limit, however well its kernels follow each other.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from benchmarks.gpu.graph_timer import gpu_time, recorded
from benchmarks.gpu.random_inputs import drawn_rows, fp8_weight, latent_cache
from benchmarks.shapes import HEADS, HIDDEN, LATENT, ROPE, WIDTH
from benchmarks.tools.gpu_power import GpuPower
from benchmarks.tools.report import BenchmarkReport
from eprt.gpu.device import multiprocessors
from eprt.ops.attention import PagedContext
from eprt.ops.cuda import attention, linear
from eprt.ops.cuda.grouped_gemm import FP8, grouped_gemm, tiling_of
from eprt.ops.cuda.quantize import quantize_rows
from eprt.ops.tuning import ProductShape, tuned
from eprt.ops.weight import Weight

NUM_RANKS = 0
NEEDS_GPU = True
NEEDS = "NVML"

EXPERTS, COPIES = 32, 6
PROJECTIONS = ((2112, HIDDEN), (HEADS * 192, 1536), (HIDDEN, HEADS * 128), (2 * WIDTH, HIDDEN), (HIDDEN, WIDTH))


@dataclass(frozen=True)
class LayerKernel:
    """A kernel, or a few that belong together."""

    name: str
    calls: Sequence[Callable[[], object]]  # of one layer each, on different data
    in_layer: bool = True  # else an alternative


def attentions(requests: int, context: int) -> Iterator[LayerKernel]:
    q = torch.randn(requests, HEADS, LATENT + ROPE, device="cuda", dtype=torch.bfloat16)
    length = torch.full((requests,), context, dtype=torch.int32, device="cuda")
    for fp8 in (False, True):
        pages = latent_cache(requests * -(-context // 64) * 64, fp8)
        where = PagedContext(pages, torch.arange(len(pages), device="cuda").int().view(requests, -1), length)
        attend, plans = attention.kernel(q[..., :LATENT], q[..., LATENT:], where).attend, {}
        inputs = q[..., :LATENT], q[..., LATENT:], where, 0.1
        name = f"attention, {'fp8' if fp8 else 'bf16'} cache"
        yield LayerKernel(name, [lambda f=attend, i=inputs, p=plans: f(*i, plans=p)], not fp8)


def absorbed(requests: int) -> LayerKernel:
    """Into the latent space and back."""
    kind = {"device": "cuda", "dtype": torch.bfloat16}
    x_NTC, y_NTL = torch.randn(HEADS, requests, 128, **kind), torch.randn(HEADS, requests, LATENT, **kind)
    weights = [torch.randn(HEADS, 256, LATENT, **kind) for _ in range(COPIES)]

    def both(w_NVL: Tensor) -> None:
        torch.bmm(x_NTC, w_NVL[:, :128])
        torch.bmm(y_NTL, w_NVL[:, 128:].transpose(1, 2))

    return LayerKernel("latent projections", [lambda w=w: both(w) for w in weights])


def projections(requests: int) -> Iterator[LayerKernel]:
    for n, k in PROJECTIONS:
        x, weights = torch.randn(requests, k, device="cuda").bfloat16(), [fp8_weight(n, k) for _ in range(COPIES)]
        yield LayerKernel(f"linear {n} x {k}", [lambda x=x, w=w: linear(x, w) for w in weights])


def experts(requests: int) -> Iterator[LayerKernel]:
    """Of one of 8 ranks, with uniformly drawn rows; also with tiles half as tall."""
    count, mean = drawn_rows(EXPERTS, requests * 8 // EXPERTS), requests * 8 // EXPERTS
    for name, weight, gated in (
        ("experts, gate and up", fp8_weight(EXPERTS, 2 * WIDTH, HIDDEN), True),
        ("experts, down", fp8_weight(EXPERTS, HIDDEN, WIDTH), False),
    ):
        x, scale = quantize_rows(torch.randn(int(count.sum()), weight.shape[2], device="cuda").bfloat16())
        shape = ProductShape(EXPERTS, weight.shape[1] // (1 + gated), weight.shape[2], "fp8", gated)
        best = tuned(x.device, shape, mean) or tiling_of(FP8, mean, gated)
        for tall in (best.block_m // 2, best.block_m):
            tiling = replace(best, block_m=tall)
            label = name if tall == best.block_m else f"{name}, tiles of {tall} rows"
            yield LayerKernel(label, [product(x, weight, scale, count, gated, tiling)], tall == best.block_m)


def product(x: Tensor, weight: Weight, scale: Tensor, count: Tensor, gated: bool, tiling) -> Callable[[], object]:
    return lambda: grouped_gemm(
        x, weight, x_scale_RG=scale, recv_count_E=count, gated=gated, quantise=gated, tiling=tiling
    )


def report_kernel(report: BenchmarkReport, power: GpuPower, kernel: LayerKernel, seconds: float) -> float:
    """Returns joules of a layer."""
    alone_s, graph = gpu_time(kernel.calls, samples=5).median_s, recorded(kernel.calls)
    per_replay_s = alone_s * len(kernel.calls)
    for length_s in (seconds / 3, seconds):  # the clock settles first
        replays = max(1, round(length_s / per_replay_s))
        series = power.begin()
        for _ in range(replays):
            graph.replay()
        torch.cuda.synchronize()
        used = series.end()
    calls = replays * len(kernel.calls)
    report.add_row(
        kernel=kernel.name,
        in_layer=kernel.in_layer,
        alone_us=alone_s * 1e6,
        us=used.seconds / calls * 1e6,
        watts=used.watts,
        mhz=used.mhz,
        layer_mj=used.joules / calls * 1e3,
    )
    return used.joules / calls if kernel.in_layer else 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=128)
    parser.add_argument("--context", type=int, default=4864)
    parser.add_argument("--seconds", type=float, default=0.9, help="of each kernel")
    args = parser.parse_args()
    power, joules = GpuPower(), 0.0
    config = {"device": torch.cuda.get_device_name(), "sms": multiprocessors(), "limit_watts": power.limit_watts}
    report = BenchmarkReport("decode_power_h200", {**config, **vars(args)})
    for kernels in (attentions(args.requests, args.context), experts(args.requests), projections(args.requests)):
        for kernel in kernels:
            joules += report_kernel(report, power, kernel, args.seconds)
    joules += report_kernel(report, power, absorbed(args.requests), args.seconds)
    report.add_row(kernel="= layer", us=joules / power.limit_watts * 1e6, layer_mj=joules * 1e3)
    report.finish()


if __name__ == "__main__":
    main()
