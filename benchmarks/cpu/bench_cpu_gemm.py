"""CPU matrix kernels beside torch: y = x W^T, weights streamed from memory, and the experts of a rank.

    cpu_linear    x[M, 2048] times W[1024, 2048]: bfloat16, fp8 and int8 weights with bfloat16 x beside torch's bfloat16
                  linear; float32 beside torch's float32 linear. The weights stay in cache.
    cpu_stream    few rows against 512 MB of weights, matrices of [4096, 2048]: GB/s beside a measured read of memory.
                  Both lie in huge pages, as a server's weights do.
    cpu_experts   the fused operator beside a loop over torch linears, decode and prefill.

Names of results carry instruction set and threads. For another set: EPRT_CPU_ISA=avx2, with ONEDNN_MAX_CPU_ISA=AVX2 for
torch; for threads OMP_NUM_THREADS. Arguments: the results wanted; default all. int8 weights are multiplied by int8
activations on AMX, elsewhere by bfloat16 ones.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.tools.report import RESULTS, BenchmarkReport
from benchmarks.tools.timing import Timing, measure
from eprt import env
from eprt.ops import Weight, grouped_experts, linear, native, quantize_fp8, quantize_int8

NUM_RANKS = 0

N, STREAM_N, K = 1024, 4096, 2048
WEIGHTS: dict[str, Callable[[Tensor], Weight]] = {
    "bfloat16": lambda w: Weight(w.bfloat16()),
    "fp8": quantize_fp8,
    "int8": quantize_int8,
    "float32": Weight,
}


def x_dtype(kind: str) -> torch.dtype:
    return torch.float32 if kind == "float32" else torch.bfloat16


def num_bytes(w: Weight) -> int:
    return w.data.numel() * w.data.element_size()


def columns(ours: Timing, theirs: Timing) -> dict[str, float]:
    return {**ours.columns("eprt"), **theirs.columns("torch"), "speedup": theirs.median_s / ours.median_s}


def compare(ours: Callable[[], object], theirs: Callable[[], object], seconds: float) -> dict[str, Timing]:
    """Alternating samples of both for about `seconds`, each sample at least a millisecond long."""
    once = measure({"eprt": ours, "torch": theirs}, samples=3)
    both_s = once["eprt"].median_s + once["torch"].median_s
    calls = max(1, int(2e-3 / both_s))
    samples = min(200, max(9, int(seconds / (both_s * calls))))
    return measure({"eprt": ours, "torch": theirs}, samples=samples, calls_per_sample=calls)


def bench_linear(report: BenchmarkReport, seconds: float) -> None:
    w_NK = torch.randn(N, K) / K**0.5
    for m in (1, 8, 64, 256, 512):
        for kind, make in WEIGHTS.items():
            x_MK, w = torch.randn(m, K).to(x_dtype(kind)), make(w_NK)
            w_torch = w_NK.to(x_dtype(kind))
            times = compare(lambda x=x_MK, w=w: linear(x, w), lambda x=x_MK, w=w_torch: F.linear(x, w), seconds)
            gmac = m * N * K / times["eprt"].median_s / 1e9
            report.add_row(M=m, weight=kind, **columns(times["eprt"], times["torch"]), eprt_gmac_s=gmac)


def bench_stream(report: BenchmarkReport, seconds: float) -> None:
    """The read is torch's sum over int64, the fastest plain reader at hand; it alternates with the kernels."""
    memory = torch.ones(512 * 2**20 // 8, dtype=torch.int64)
    w_NK = torch.randn(STREAM_N, K) / K**0.5
    for kind, make in WEIGHTS.items():
        one = make(w_NK)
        copies = memory.nbytes // num_bytes(one)
        weights = [Weight(one.data.clone(), one.scale) for _ in range(copies)]
        for m in (1, 4, 8):
            x_MK = torch.randn(m, K).to(x_dtype(kind))

            def sweep(x=x_MK, weights=weights) -> None:
                for w in weights:
                    linear(x, w)

            times = measure({"eprt": sweep, "read": memory.sum}, samples=max(3, int(6 * seconds)), warmup=1)
            gb_s = copies * num_bytes(one) / times["eprt"].median_s / 1e9
            read_gb_s = memory.nbytes / times["read"].median_s / 1e9
            report.add_row(
                M=m,
                weight=kind,
                eprt_gb_s=gb_s,
                read_gb_s=read_gb_s,
                fraction=gb_s / read_gb_s,
                **times["eprt"].columns("eprt", "ms"),
                **times["read"].columns("read", "ms"),
            )


def torch_experts(x_RH: Tensor, counts: list[int], w13: Tensor, w2: Tensor) -> Tensor:
    y, start = torch.empty_like(x_RH), 0
    for e, count in enumerate(counts):
        if count:
            gate, up = F.linear(x_RH[start : start + count], w13[e]).chunk(2, -1)
            y[start : start + count] = F.linear(F.silu(gate) * up, w2[e])
            start += count
    return y


def bench_experts(report: BenchmarkReport, seconds: float) -> None:
    hidden, inner, num_experts = 2048, 1024, 32
    w13_EIH = torch.randn(num_experts, 2 * inner, hidden) / hidden**0.5
    w2_EHI = torch.randn(num_experts, hidden, inner) / inner**0.5
    for kind, make in WEIGHTS.items():
        w13, w2 = make(w13_EIH), make(w2_EHI)
        w13_torch, w2_torch = w13_EIH.to(x_dtype(kind)), w2_EHI.to(x_dtype(kind))
        for rows in (1, 4, 16, 128):
            counts = torch.full((num_experts,), rows, dtype=torch.int32)
            x_RH = torch.randn(num_experts * rows, hidden).to(x_dtype(kind))
            times = compare(
                lambda x=x_RH, c=counts, a=w13, b=w2: grouped_experts(x, c, a, b),
                lambda x=x_RH, c=[rows] * num_experts, a=w13_torch, b=w2_torch: torch_experts(x, c, a, b),
                1.3 * seconds,
            )
            median_s = times["eprt"].median_s
            report.add_row(
                rows_per_expert=rows,
                weight=kind,
                **columns(times["eprt"], times["torch"]),
                eprt_gb_s=(num_bytes(w13) + num_bytes(w2)) / median_s / 1e9,
                eprt_gmac_s=num_experts * rows * hidden * inner * 3 / median_s / 1e9,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="RESULT", help="default: all three")
    parser.add_argument("--seconds", type=float, default=1.5, help="about as long for each row, default %(default)s")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    env.let_torch_use_huge_pages()
    torch.manual_seed(0)
    native.load()
    config = {"isa": native.isa(), "threads": torch.get_num_threads()}
    cases = {
        "cpu_linear": (bench_linear, {"N": N, "K": K}),
        "cpu_stream": (bench_stream, {"N": STREAM_N, "K": K}),
        "cpu_experts": (bench_experts, {"experts": 32, "hidden": 2048, "inner": 1024}),
    }
    for name in args.names or cases:
        bench, sizes = cases[name]
        report = BenchmarkReport(f"{name}_{native.isa()}_{torch.get_num_threads()}t", {**config, **sizes})
        bench(report, args.seconds)
        report.finish(args.out)


if __name__ == "__main__":
    main()
