"""Measures tilings of the experts' products on this GPU and keeps the fastest in eprt/ops/tunings, where products
find them. Every candidate must give the default's result before it is timed.

    python -m benchmarks.tune_grouped_gemm --experts 32 --hidden 7168 --width 2048 --format fp8
"""

import argparse
import contextlib
import itertools
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace

import torch

from benchmarks.bench_gpu_layers import bf16_weight, fp8_weight, gpu_time
from benchmarks.report import table
from eprt import EPGroup
from eprt.gpu.device import take_device
from eprt.ops import tuning
from eprt.ops.cuda.grouped_gemm import grouped_gemm, tiling_of
from eprt.ops.cuda.quantize import quantize_rows
from eprt.ops.tuning import Shape, Tiling

ROWS = (8, 16, 32, 64, 128, 256)
FORMATS = {"fp8": torch.float8_e4m3fn, "same": torch.bfloat16}


def candidates(shape: Shape, rows: int) -> list[Tiling]:
    """block_n stays 128 where the product quantises its result. Tiles much taller than an expert's rows waste work."""
    quantises = shape.gated and shape.kind == "fp8"
    block_k = 128 if shape.kind == "fp8" else 64
    tall = [block_m for block_m in (16, 32, 64, 128) if block_m <= max(16, rows) and 4 * block_m >= min(rows, 128)]
    shapes = itertools.product(tall, (128,) if quantises else (64, 128), (4, 8), (3, 4, 5), (1, 2, 3))
    return [
        Tiling(block_m, block_n, block_k, warps, stages, programs)
        for block_m, block_n, warps, stages, programs in shapes
        if block_m * (2 if shape.gated else 1) * block_n <= warps * 4096  # accumulators that registers can hold
    ]


def compile_ahead(shape: Shape, rows: int, tiling: Tiling) -> None:
    """In a process of its own: leaves the kernel in Triton's cache."""
    from benchmarks.gpu_kernels import CompiledOnly, tensor, weight

    fp8 = shape.kind == "fp8"
    w = weight(shape.experts, shape.n * (2 if shape.gated else 1), shape.k, dtype=FORMATS[shape.kind])
    x, count = tensor(shape.experts * rows, shape.k, dtype=w.data.dtype), tensor(shape.experts, dtype=torch.int32)
    scale = tensor(shape.experts * rows, -(-shape.k // 128), dtype=torch.float32) if fp8 else None
    with contextlib.suppress(Exception), CompiledOnly():  # what cannot be compiled is told when it is timed
        quantise = shape.gated and fp8
        grouped_gemm(x, w, x_scale_RG=scale, recv_count_E=count, gated=shape.gated, quantise=quantise, tiling=tiling)


def compile_all(cases: list[tuple[Shape, int]], jobs: int) -> None:
    kernels = ((shape, rows, tiling) for shape, rows in cases for tiling in candidates(shape, rows))
    work = {(shape, replace(tiling, programs_per_sm=1)): rows for shape, rows, tiling in kernels}
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        list(pool.map(compile_ahead, *zip(*((shape, rows, tiling) for (shape, tiling), rows in work.items()))))


def tune(shape: Shape, rows: int) -> tuple[Tiling, float, float]:
    """(fastest, its seconds, the default's seconds)"""
    make = fp8_weight if shape.kind == "fp8" else bf16_weight
    weight = make(shape.experts, shape.n * (2 if shape.gated else 1), shape.k)
    x, scale = torch.randn(shape.experts * rows, shape.k, device="cuda", dtype=torch.bfloat16), None
    if shape.kind == "fp8":
        x, scale = quantize_rows(x)
    count = torch.full((shape.experts,), rows, dtype=torch.int32, device="cuda")

    def product(tiling: Tiling | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        quantise = shape.gated and shape.kind == "fp8"
        return grouped_gemm(
            x, weight, x_scale_RG=scale, recv_count_E=count, gated=shape.gated, quantise=quantise, tiling=tiling
        )

    default = tiling_of(("fp8", "same").index(shape.kind), rows, shape.gated)
    want, best = plain(*product(default)), (float("inf"), default)
    default_s = gpu_time([lambda: product(default)], samples=7).median_s
    for tiling in candidates(shape, rows):
        try:
            error = (plain(*product(tiling)) - want).norm() / want.norm()
            seconds = gpu_time([lambda t=tiling: product(t)], samples=7).median_s
        except Exception as failure:  # more shared memory or registers than there are
            print(f"{tiling}: {str(failure).splitlines()[0][:100]}")
            continue
        assert error < 0.03, f"{tiling} computes something else: relative error {error:.3g}"
        best = min(best, (seconds, tiling), key=lambda pair: pair[0])
    return best[1], best[0], default_s


def plain(y: torch.Tensor, y_scale: torch.Tensor | None) -> torch.Tensor:
    return y.float() if y_scale is None else y.float() * y_scale.repeat_interleave(128, 1)[:, : y.shape[1]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experts", type=int, default=32, help="on one GPU")
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--width", type=int, default=2048, help="of one expert")
    parser.add_argument("--format", choices=("fp8", "bf16"), default="fp8")
    parser.add_argument("--rows", type=int, nargs="*", default=ROWS, help="per expert")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes that compile")
    arguments = parser.parse_args()
    kind = "fp8" if arguments.format == "fp8" else "same"
    shapes = [
        Shape(arguments.experts, n, k, kind, gated)
        for gated, n, k in ((True, arguments.width, arguments.hidden), (False, arguments.hidden, arguments.width))
    ]
    cases = [(shape, rows) for shape in shapes for rows in arguments.rows]
    compile_all(cases, arguments.jobs)
    take_device("cuda", EPGroup.single())
    found, shown = {}, []
    for shape, rows in cases:
        tiling, seconds, default_s = tune(shape, rows)
        found.setdefault(shape, {})[rows] = tiling
        times = {"us": seconds * 1e6, "default_us": default_s * 1e6}
        shown.append({"n": shape.n, "k": shape.k, "rows": rows, **times, **vars(tiling)})
    print(table(shown))
    print(tuning.write(torch.cuda.get_device_name(), found))


if __name__ == "__main__":
    main()
