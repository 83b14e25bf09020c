"""The routed experts of DeepSeek-V3 with many rows each, fp8: as one grouped product, and singly through cuBLAS.

us from event to event with the host far ahead, and _not_ahead_us where it launches as the GPU computes; host_us: what
the host needs to launch them. spread: rows of an expert are drawn from 0.5 to 1.5 times the mean.
"""

import statistics
import time
from collections.abc import Callable

import torch

from benchmarks.gpu.graph_timer import gpu_word
from benchmarks.gpu.random_inputs import fp8_weight
from benchmarks.shapes import HIDDEN, WIDTH
from benchmarks.tools.report import BenchmarkReport
from eprt import EPGroup
from eprt.gpu.device import take_device
from eprt.ops.cuda import grouped_experts
from eprt.ops.cuda.experts_cublas import experts_one_by_one
from eprt.ops.cuda.quantize import quantize_rows
from eprt.ops.known_rows import KnownRows

NUM_RANKS = 0
NEEDS_GPU = True
CASES = [
    *((32, rows, False) for rows in (128, 256, 384, 512, 768, 1024, 2048)),
    (16, 4096, False),
    *((32, rows, True) for rows in (256, 512, 1024, 2048)),
]
_AHEAD_CYCLES = 8_000_000


def timed(call: Callable[[], object], ahead: bool, samples: int = 5) -> tuple[float, float]:
    """us of the GPU and of the host: medians."""
    spans, host_us = [], []
    for sample in range(samples + 2):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        if ahead:
            torch.cuda._sleep(_AHEAD_CYCLES)
        start = time.perf_counter()
        begin.record()
        call()
        end.record()
        spent = time.perf_counter() - start
        torch.cuda.synchronize()
        if sample >= 2:
            spans.append(begin.elapsed_time(end) * 1e3)
            host_us.append(spent * 1e6)
    return statistics.median(spans), statistics.median(host_us)


def counts_of(experts: int, rows: int, spread: bool) -> list[int]:
    if not spread:
        return [rows] * experts
    share = torch.rand(experts) + 0.5
    return (share / share.sum() * experts * rows).int().tolist()


def main() -> None:
    take_device("cuda", EPGroup.single())
    torch.manual_seed(0)
    report = BenchmarkReport(
        f"many_rows_{gpu_word()}", {"device": torch.cuda.get_device_name(), "gpus": 1, "torch": torch.__version__}
    )
    w13, w2 = fp8_weight(32, 2 * WIDTH, HIDDEN), fp8_weight(32, HIDDEN, WIDTH)
    for experts, rows, spread in CASES:
        counts = counts_of(experts, rows, spread)
        x, scale = quantize_rows(torch.randn(sum(counts), HIDDEN, device="cuda", dtype=torch.bfloat16))
        y, known = torch.empty(x.shape, device="cuda", dtype=torch.bfloat16), KnownRows(counts, list(range(experts)))
        count, buffer = (torch.tensor(values, device="cuda").int() for values in (counts, known.matrices))
        row = {}
        for name, call in (
            ("grouped", lambda: grouped_experts(x, count, w13, w2, y, buffer, scale)),  # noqa: B023
            ("singly", lambda: experts_one_by_one(x, count, w13, w2, y, scale, known)),  # noqa: B023
        ):
            us, host_us = timed(call, ahead=True)
            row |= {f"{name}_us": us, f"{name}_tflops": 6 * len(x) * HIDDEN * WIDTH / us / 1e6}
            row |= {f"{name}_host_us": host_us, f"{name}_not_ahead_us": timed(call, ahead=False)[0]}
        report.add_row(experts=experts, rows=rows, spread=spread, **row)
    report.finish()


if __name__ == "__main__":
    main()
