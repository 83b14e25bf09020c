"""Products of DeepSeek-V3 on one GPU by the format of their weights: bfloat16, fp8 and int8, each of the same values.

experts    32 routed experts, SiLU included, 1 to 512 rows each
dense      the projections of an attention layer and the shared expert's, 1 to 4096 rows

Quantising the bfloat16 rows is part of the time; weights are cold. error: of the quantised result, relative to the
length of bfloat16's, for normally distributed rows and weights.
"""

import functools
import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor

import torch
from torch import Tensor

from benchmarks.gpu.graph_timer import bandwidth, gpu_time, gpu_word
from benchmarks.shapes import HEADS, HIDDEN, WIDTH
from benchmarks.tools.report import BenchmarkReport
from eprt import EPGroup
from eprt.gpu.device import take_device
from eprt.ops.cuda import grouped_experts, linear
from eprt.ops.weight import Weight, quantize_fp8, quantize_int8

NUM_RANKS = 0
NEEDS_GPU = True

FORMATS: dict[str, Callable[[Tensor], Weight]] = {"bf16": Weight, "fp8": quantize_fp8, "int8": quantize_int8}
EXPERTS = 32
EXPERT_ROWS = (1, 8, 16, 32, 64, 128, 512)
DENSE = ((2112, HIDDEN), (HEADS * 192, 1536), (HIDDEN, HEADS * 128), (2 * WIDTH, HIDDEN), (HIDDEN, WIDTH))
DENSE_ROWS = (1, 16, 128, 512, 4096)


def converted(name: str, w: Tensor) -> Weight:
    """Matrix by matrix: in float32 a stack takes twice its memory. (torch does not stack e4m3.)"""
    if w.dim() == 2:
        return FORMATS[name](w)
    parts = [FORMATS[name](part) for part in w]
    data = torch.stack([part.data.view(torch.uint8) for part in parts]).view(parts[0].data.dtype)
    scales = [part.scale for part in parts if part.scale is not None]
    return Weight(data, torch.stack(scales) if scales else None)


def random_weight(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16).mul_(shape[-1] ** -0.5)


@functools.cache
def expert_weights(name: str) -> tuple[Weight, Weight]:
    torch.manual_seed(0)
    w13, w2 = random_weight(EXPERTS, 2 * WIDTH, HIDDEN), random_weight(EXPERTS, HIDDEN, WIDTH)
    return converted(name, w13), converted(name, w2)


@functools.cache
def dense_weights(name: str, shape: tuple[int, int]) -> list[Weight]:
    """Copies of one matrix, more than stay in the L2 cache."""
    torch.manual_seed(0)
    first = converted(name, random_weight(*shape))
    return [Weight(first.data.clone(), first.scale) for _ in range(max(2, (200 << 20) // first.data.numel()))]


def cases() -> list[tuple[str, tuple[int, int], int]]:
    """(what, [n, k] of dense products, rows)"""
    experts = [("experts", (WIDTH, HIDDEN), rows) for rows in EXPERT_ROWS]
    return experts + [("dense", shape, rows) for shape in DENSE for rows in DENSE_ROWS]


def calls_of(name: str, what: str, shape: tuple[int, int], rows: int) -> list[Callable[[], Tensor]]:
    torch.manual_seed(rows)
    if what == "dense":
        x_MK = torch.randn(rows, shape[1], device="cuda", dtype=torch.bfloat16)
        return [lambda w=w: linear(x_MK, w) for w in dense_weights(name, shape)]
    x_RH = torch.randn(EXPERTS * rows, HIDDEN, device="cuda", dtype=torch.bfloat16)
    count_E = torch.full((EXPERTS,), rows, device="cuda").int()
    return [lambda: grouped_experts(x_RH, count_E, *expert_weights(name))]


def compile_kernels(name: str, part: int, parts: int) -> None:
    """In a process of its own: leaves kernels in Triton's cache."""
    take_device("cuda", EPGroup.single())
    for case in cases()[part::parts]:
        calls_of(name, *case)[0]()
        torch.cuda.synchronize()


def compile_all(parts: int = 4) -> None:
    work = [(name, part, parts) for name in FORMATS for part in range(parts)]
    with ProcessPoolExecutor(len(work), mp_context=multiprocessing.get_context("spawn")) as pool:
        list(pool.map(compile_kernels, *zip(*work)))


def main() -> None:
    compile_all()
    take_device("cuda", EPGroup.single())
    hbm = bandwidth()
    config = {
        "device": torch.cuda.get_device_name(),
        "gpus": 1,
        "hbm_GBps": round(hbm / 1e9),
        "torch": torch.__version__,
    }
    report = BenchmarkReport(f"weight_formats_{gpu_word()}", config)
    for what, (n, k), rows in cases():
        row, want = {}, None
        for name in FORMATS:
            calls = calls_of(name, what, (n, k), rows)
            got, times = calls[0]().float(), gpu_time(calls, samples=9)
            want = got if want is None else want
            operations = 2 * rows * n * k * (1 if what == "dense" else 3 * EXPERTS)
            row |= times.columns(name) | {f"{name}_tflops": operations / times.median_s / 1e12}
            if name != "bf16":
                row[f"{name}_error"] = ((got - want).norm() / want.norm()).item()
        floor_s = n * k * (1 if what == "dense" else 3 * EXPERTS) / hbm
        report.add_row(what=what, n=n, k=k, rows=rows, **row, weights_floor_us=floor_s * 1e6)
    report.finish()


if __name__ == "__main__":
    main()
