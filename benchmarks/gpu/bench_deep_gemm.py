"""fp8 products of DeepSeek-V3's shapes: ours beside DeepGEMM's, grouped by expert and dense, in turns.

    pip install sgl-deep-gemm; python -m benchmarks.gpu.bench_deep_gemm

grouped    32 experts of drawn rows; DeepGEMM in the faster of its two layouts, without one whose result is wrong. Gate
           and up of ours include SiLU and quantising, which DeepGEMM leaves to a kernel of its caller:
           `deep_gemm_whole_us` is with ours of that kernel
dense      an attention layer's projections and the shared expert's

Rows are quantised and laid out before; weights are cold. ratio: our time over DeepGEMM's, for the same work.
"""

import argparse
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.deep_gemm_peer import DeepGemm, PeerProduct, load
from benchmarks.gpu.graph_timer import gpu_times_in_turns, gpu_word
from benchmarks.gpu.random_inputs import drawn_rows, fp8_weight
from benchmarks.shapes import HEADS, HIDDEN, WIDTH
from benchmarks.tools.report import BenchmarkReport
from benchmarks.tools.timing import Timing
from eprt import EPGroup
from eprt.gpu.device import take_device
from eprt.ops.cuda.grouped_gemm import grouped_gemm
from eprt.ops.cuda.linear import fp8_linear
from eprt.ops.cuda.quantize import quantize_rows
from eprt.ops.cuda.silu import silu_mul_quantize
from eprt.ops.weight import Weight

NUM_RANKS = 0
NEEDS_GPU = True
NEEDS = "sgl-deep-gemm"

EXPERTS = 32
ROWS = (8, 16, 32, 64, 128, 256, 512)
DENSE = ((2112, HIDDEN), (HEADS * 192, 1536), (HIDDEN, HEADS * 128), (2 * WIDTH, HIDDEN), (HIDDEN, WIDTH))
DENSE_ROWS = (16, 32, 64, 128, 512, 4096)
_COLD_BYTES = 200 << 20  # of weights, so that none is in the L2 cache when its turn comes
_MOST_DIFFERENCE = 0.01  # of results, relative to their length


class Products:
    """Rows of the report, each of one product. Both sides multiply the same quantised values."""

    def __init__(self, peer: DeepGemm, samples: int):
        self.peer, self.samples = peer, samples

    def grouped(self, rows: int) -> list[dict[str, Any]]:
        count_E = drawn_rows(EXPERTS, rows)
        return [self._gate_and_up(rows, count_E), self._down(rows, count_E)]

    def _gate_and_up(self, rows: int, count_E: Tensor) -> dict[str, Any]:
        w = fp8_weight(EXPERTS, 2 * WIDTH, HIDDEN)
        x, (data, scale), layouts = self._operands(w, rows, count_E)
        plain = grouped_gemm(data, w, x_scale_RG=scale, recv_count_E=count_E)[0]
        calls: dict[str, Callable[[], object]] = {
            "eprt": lambda: grouped_gemm(data, w, x_scale_RG=scale, recv_count_E=count_E, gated=True, quantise=True)
        }
        layouts = agreeing(layouts, plain)
        for name, product in layouts.items():
            calls[name] = product
            calls[f"{name}, whole"] = lambda product=product: (product(), silu_mul_quantize(product.y))
        times = gpu_times_in_turns({name: [call] for name, call in calls.items()}, self.samples)
        columns = self._columns("gate and up", rows, w, len(x), times, list(layouts))
        whole = min(times[f"{name}, whole"].median_s for name in layouts)
        return columns | {
            "deep_gemm_whole_us": round(whole * 1e6, 1),
            "ratio": round(times["eprt"].median_s / whole, 3),
        }

    def _down(self, rows: int, count_E: Tensor) -> dict[str, Any]:
        w = fp8_weight(EXPERTS, HIDDEN, WIDTH)
        x, (data, scale), layouts = self._operands(w, rows, count_E)
        layouts = agreeing(layouts, grouped_gemm(data, w, x_scale_RG=scale, recv_count_E=count_E)[0])
        calls: dict[str, Callable[[], object]] = {
            "eprt": lambda: grouped_gemm(data, w, x_scale_RG=scale, recv_count_E=count_E)
        }
        times = gpu_times_in_turns({name: [call] for name, call in (calls | layouts).items()}, self.samples)
        return self._columns("down", rows, w, len(x), times, list(layouts))

    def _operands(
        self, w: Weight, rows: int, count_E: Tensor
    ) -> tuple[Tensor, tuple[Tensor, Tensor], dict[str, PeerProduct]]:
        """(rows, the same quantised, DeepGEMM's products of them)"""
        x = torch.randn(EXPERTS * rows, w.shape[-1], device="cuda", dtype=torch.bfloat16)
        counts = count_E.tolist()
        layouts = {"masked": self.peer.masked(x, w, counts), "contiguous": self.peer.contiguous(x, w, counts)}
        return x, quantize_rows(x), layouts

    def dense(self, n: int, k: int, rows: int) -> dict[str, Any]:
        weights = [fp8_weight(n, k) for _ in range(max(1, -(-_COLD_BYTES // (n * k))))]
        x = torch.randn(rows, k, device="cuda", dtype=torch.bfloat16)
        quantised = {padded_to: quantize_rows(x, padded_to) for padded_to in (1, 16)}

        def prepared(_: Tensor, padded_to: int = 1) -> tuple[Tensor, Tensor]:
            return quantised[padded_to]

        ours = [lambda w=w: fp8_linear(x, w, torch.bfloat16, prepared) for w in weights]
        theirs = [self.peer.dense(x, w) for w in weights]
        agreeing({"dense": theirs[0]}, ours[0]())
        times = gpu_times_in_turns({"eprt": ours, "dense": theirs}, self.samples)
        return self._columns("dense", rows, weights[0], rows, times, ["dense"])

    def _columns(
        self, what: str, rows: int, w: Weight, total: int, times: dict[str, Timing], layouts: list[str]
    ) -> dict[str, Any]:
        n, k = w.shape[-2:]
        best = min(layouts, key=lambda name: times[name].median_s)
        tflops = {
            side: round(2e-12 * total * n * k / times[name].median_s)
            for side, name in (("eprt", "eprt"), ("deep_gemm", best))
        }
        return {
            "what": what,
            "n": n,
            "k": k,
            "rows": rows,
            **times["eprt"].columns("eprt"),
            **times[best].columns("deep_gemm"),
            "layout": best,
            "deep_gemm_whole_us": None,
            "ratio": round(times["eprt"].median_s / times[best].median_s, 3),
            "eprt_tflops": tflops["eprt"],
            "deep_gemm_tflops": tflops["deep_gemm"],
        }


def agreeing(products: dict[str, PeerProduct], expected: Tensor) -> dict[str, PeerProduct]:
    """Those that compute what we do. If none does, the mistake may be ours."""
    differences = {name: difference(product, expected) for name, product in products.items()}
    right = {name: products[name] for name, by in differences.items() if by < _MOST_DIFFERENCE}
    if not right:
        raise SystemExit(f"DeepGEMM differs from our product, relative to its length: {differences}")
    for name in products.keys() - right.keys():
        print(f"left out: DeepGEMM ({name}) differs from our product by {differences[name]}, relative to its length")
    return right


def difference(product: PeerProduct, expected: Tensor) -> float:
    product()
    expected = expected.float()
    return float((product.rows().float() - expected).norm() / expected.norm())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="*", default=ROWS)
    parser.add_argument("--dense-rows", type=int, nargs="*", default=DENSE_ROWS)
    parser.add_argument("--samples", type=int, default=15)
    arguments = parser.parse_args()
    take_device("cuda", EPGroup.single())
    torch.manual_seed(0)
    products = Products(DeepGemm(load()), arguments.samples)
    config = {"device": torch.cuda.get_device_name(), "gpus": 1, "torch": torch.__version__, "experts": EXPERTS}
    report = BenchmarkReport(f"deep_gemm_{gpu_word()}", config)
    for rows in arguments.rows:
        for row in products.grouped(rows):
            report.add_row(**row)
    for n, k in DENSE:
        for rows in arguments.dense_rows:
            report.add_row(**products.dense(n, k, rows))
    report.finish()


if __name__ == "__main__":
    main()
