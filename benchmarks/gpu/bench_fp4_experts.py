"""Routed experts of DeepSeek-V4-Flash on one GPU by the format of their weights: fp4, fp8 and bfloat16.

256 experts, SiLU of cut activations included, 1 to 1024 rows each, as even as they can be; bfloat16 rows, whose
quantising or splitting is part of the time. Weights are cold: of any format they are larger than the L2 cache. bfloat16
weights hold fp4's values, fp8 weights are rounded from them. From 768 rows on the host knows how many there are, and
experts are computed one by one; fp4_grouped is the grouped product there.

floor: the time that the memory takes to read the weights, and their scales, once.
error: of fp4, relative to bfloat16's result. Formats take turns.
"""

import functools
import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor

import torch
from torch import Tensor

from benchmarks.gpu.graph_timer import bandwidth, gpu_times_in_turns, gpu_word
from benchmarks.gpu.random_inputs import fp4_weight
from benchmarks.tools.report import BenchmarkReport
from eprt import EPGroup
from eprt.gpu.device import take_device
from eprt.ops.cuda import grouped_experts
from eprt.ops.known_rows import LEAST_ROWS, KnownRows
from eprt.ops.weight import Weight, quantize_fp8

NUM_RANKS = 0
NEEDS_GPU = True

EXPERTS, HIDDEN, WIDTH, LIMIT = 256, 4096, 2048, 10.0
FORMATS = ("fp4", "fp8", "bf16")
ROWS = (1, 8, 32, 64, 128, 512, 1024)


def converted(fp4: Weight, name: str) -> Weight:
    """Matrix by matrix: in float32 a stack takes eight times its memory."""
    if name == "fp4":
        return fp4
    assert fp4.scale is not None
    dtype = torch.bfloat16 if name == "bf16" else torch.float8_e4m3fn
    data = torch.empty(fp4.shape, dtype=dtype, device="cuda")
    scale = (
        None if name == "bf16" else torch.empty(*(s // 128 if s >= 128 and i else s for i, s in enumerate(fp4.shape)))
    )
    scale = None if scale is None else scale.to("cuda")
    for e, (codes, exponents) in enumerate(zip(fp4.data, fp4.scale)):
        wide = Weight(codes, exponents).dequantize()
        one = Weight(wide.bfloat16()) if scale is None else quantize_fp8(wide)
        data[e].copy_(one.data)
        if scale is not None and one.scale is not None:
            scale[e].copy_(one.scale)
    return Weight(data, scale)


@functools.cache
def weights(name: str) -> tuple[Weight, Weight]:
    if name != "fp4":
        w13, w2 = weights("fp4")
        return converted(w13, name), converted(w2, name)
    torch.manual_seed(0)
    return fp4_weight(EXPERTS, 2 * WIDTH, HIDDEN), fp4_weight(EXPERTS, HIDDEN, WIDTH)


def call_of(name: str, rows: int) -> Callable[[], Tensor]:
    torch.manual_seed(rows)
    x_RH = torch.randn(EXPERTS * rows, HIDDEN, device="cuda", dtype=torch.bfloat16)
    count_E = torch.full((EXPERTS,), rows, dtype=torch.int32, device="cuda")
    known = None if name == "fp4_grouped" else KnownRows((rows,) * EXPERTS, range(EXPERTS))
    return lambda: grouped_experts(x_RH, count_E, *weights(name.split("_")[0]), known=known, limit=LIMIT)


def floor_s(name: str, bytes_per_s: float) -> float:
    parts = [part for w in weights(name) for part in (w.data, w.scale) if part is not None]
    return sum(part.nbytes for part in parts) / bytes_per_s


def compile_kernels(rows: int) -> None:
    """In a process of its own: leaves kernels in Triton's cache. Few experts have the same kernels as many."""
    from benchmarks.gpu import gpu_kernels
    from eprt.ops.cuda import grouped_gemm

    grouped_gemm.count_sms = lambda device: 132
    with gpu_kernels.CompiledOnly():
        count_E, x_RH = (gpu_kernels.tensor(EXPERTS, dtype=torch.int32), gpu_kernels.tensor(EXPERTS * rows, HIDDEN))
        for dtype in (torch.uint8, torch.float8_e4m3fn, torch.bfloat16):
            w13 = gpu_kernels.weight(EXPERTS, 2 * WIDTH, HIDDEN, dtype=dtype)
            grouped_experts(x_RH, count_E, w13, gpu_kernels.weight(EXPERTS, HIDDEN, WIDTH, dtype=dtype), limit=LIMIT)


def compile_all() -> None:
    with ProcessPoolExecutor(len(ROWS), mp_context=multiprocessing.get_context("spawn")) as pool:
        list(pool.map(compile_kernels, ROWS))


def main() -> None:
    compile_all()
    take_device("cuda", EPGroup.single())
    hbm = bandwidth()
    device = {"device": torch.cuda.get_device_name(), "gpus": 1, "hbm_GBps": round(hbm / 1e9)}
    shape = {"experts": EXPERTS, "hidden": HIDDEN, "width": WIDTH}
    report = BenchmarkReport(f"fp4_experts_{gpu_word()}", {**device, "torch": torch.__version__, **shape})
    floors = {name: floor_s(name, hbm) for name in FORMATS}
    for rows in ROWS:
        names = FORMATS if rows < LEAST_ROWS else (*FORMATS, "fp4_grouped")
        calls = {name: call_of(name, rows) for name in names}
        got, want = calls["fp4"]().float(), calls["bf16"]().float()
        error = ((got - want).norm() / want.norm()).item()
        assert error < 5e-3, f"{rows} rows: fp4 computes something else than bfloat16 of the same values, {error:.3g}"
        times = gpu_times_in_turns({name: [call] for name, call in calls.items()}, samples=15)
        columns = {"rows": rows, "fp4_error": error}
        operations = 6 * EXPERTS * rows * HIDDEN * WIDTH
        for name in names:
            floor, median_s = floors[name.split("_")[0]], times[name].median_s
            columns |= times[name].columns(name) | {f"{name}_floor_us": floor * 1e6}
            columns |= {f"{name}_over_floor": median_s / floor, f"{name}_tflops": operations / median_s / 1e12}
        report.add_row(**columns)
    report.finish()


if __name__ == "__main__":
    main()
