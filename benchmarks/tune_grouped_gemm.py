"""Measures tilings of the experts' products on this GPU and keeps the fastest in eprt/ops/tunings, where products
find them. Every candidate must give the default's result before it is timed.

    python -m benchmarks.tune_grouped_gemm --experts 32 --hidden 7168 --width 2048 --format fp8
"""

import argparse
from collections.abc import Iterator

import torch

from benchmarks.bench_gpu_layers import bf16_weight, fp8_weight, gpu_time
from benchmarks.report import table
from eprt import EPGroup
from eprt.gpu.device import take_device
from eprt.ops import tuning
from eprt.ops.cuda.grouped_gemm import grouped_gemm
from eprt.ops.cuda.quantize import quantize_rows
from eprt.ops.tuning import Shape, Tiling

ROWS = (8, 16, 32, 64, 128, 256)


def candidates(kind: str, gated: bool, rows: int) -> Iterator[Tiling]:
    """block_n stays 128 where the product quantises its result."""
    block_k = 128 if kind == "fp8" else 64
    for block_m in (16, 32, 64, 128):
        if block_m > max(16, rows) or (gated and block_m > 64):
            continue
        for block_n in (128,) if gated and kind == "fp8" else (64, 128):
            for num_warps in (4, 8):
                for num_stages in (3, 4, 5):
                    for programs in (1, 2, 3):
                        yield Tiling(block_m, block_n, block_k, num_warps, num_stages, programs)


def tune(shape: Shape, rows: int) -> tuple[Tiling, float, float]:
    """(fastest, its seconds, the default's seconds)"""
    make = fp8_weight if shape.kind == "fp8" else bf16_weight
    weight = make(shape.experts, shape.n * (2 if shape.gated else 1), shape.k)
    x, scale = torch.randn(shape.experts * rows, shape.k, device="cuda", dtype=torch.bfloat16), None
    if shape.kind == "fp8":
        x, scale = quantize_rows(x)
    count = torch.full((shape.experts,), rows, dtype=torch.int32, device="cuda")

    def product(tiling: Tiling | None) -> torch.Tensor:
        quantise = shape.gated and shape.kind == "fp8"
        y, y_scale = grouped_gemm(
            x, weight, x_scale_RG=scale, recv_count_E=count, gated=shape.gated, quantise=quantise, tiling=tiling
        )
        return y if y_scale is None else y.float() * y_scale.repeat_interleave(128, 1)[:, : y.shape[1]]

    want, best = product(None).float(), (float("inf"), None)
    default_s = gpu_time([lambda: product(None)], samples=7).median_s
    for tiling in candidates(shape.kind, shape.gated, rows):
        try:
            error = (product(tiling).float() - want).norm() / want.norm()
            seconds = gpu_time([lambda t=tiling: product(t)], samples=7).median_s
        except Exception as failure:  # more shared memory or registers than there are
            print(f"{tiling}: {str(failure).splitlines()[0][:100]}")
            continue
        assert error < 0.03, f"{tiling} computes something else: relative error {error:.3g}"
        best = min(best, (seconds, tiling), key=lambda pair: pair[0])
    assert best[1] is not None, "no tiling ran"
    return best[1], best[0], default_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experts", type=int, default=32, help="on one GPU")
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--width", type=int, default=2048, help="of one expert")
    parser.add_argument("--format", choices=("fp8", "bf16"), default="fp8")
    parser.add_argument("--rows", type=int, nargs="*", default=ROWS, help="per expert")
    arguments = parser.parse_args()
    take_device("cuda", EPGroup.single())
    kind, found, shown = ("fp8" if arguments.format == "fp8" else "same"), {}, []
    for gated, n, k in ((True, arguments.width, arguments.hidden), (False, arguments.hidden, arguments.width)):
        shape = Shape(arguments.experts, n, k, kind, gated)
        for rows in arguments.rows:
            tiling, seconds, default_s = tune(shape, rows)
            found.setdefault(shape, {})[rows] = tiling
            times = {"us": seconds * 1e6, "before_us": default_s * 1e6}
            shown.append({"n": n, "k": k, "rows": rows, **times, **vars(tiling)})
    print(table(shown))
    print(tuning.write(torch.cuda.get_device_name(), found))


if __name__ == "__main__":
    main()
