"""What the compiler makes of the GPU kernels, for Hopper, at the width of DeepSeek-V3. Needs no GPU.

    python -m benchmarks.gpu.gpu_kernels [norms linear experts attention]

Registers and spilled bytes per thread, shared memory per block, and how many tensor-core (wgmma, mma) and asynchronous
copy (cp.async) instructions there are. A kernel that spills much, or multiplies without wgmma, will be slow.
"""

import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from benchmarks.shapes import HEADS, HIDDEN, LATENT, ROPE, WIDTH
from benchmarks.tools.report import table
from eprt.ops import cuda
from eprt.ops.attention import PagedContext
from eprt.ops.cuda import experts_cublas, grouped_gemm, mla_expanded, mla_triton, norm, silu
from eprt.ops.elementwise import Rotation
from eprt.ops.gate import GateRule
from eprt.ops.kv_format import KVFormat
from eprt.ops.weight import FP4_BLOCK, Weight

NUM_RANKS = 0
ON_REQUEST = "needs Triton, writes no figures"

EXPERTS = 32
SHOWN = (
    "GATED",
    "KIND",
    "BLOCK_M",
    "BLOCK_N",
    "BLOCK_K",
    "TILE",
    "KEYS",
    "REQUESTS",
    "SPLIT",
    "SPLIT_K",
    "ADD",
    "FP8",
)


class Hopper:
    """What Triton asks of a driver in order to compile."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("meta")


class CompiledOnly:
    """While it is entered, a launch compiles its kernel and adds a row instead of running anything."""

    def __init__(self):
        self.rows: dict[str, dict[str, Any]] = {}

    def __enter__(self) -> "CompiledOnly":
        triton.runtime.driver.set_active(Hopper())
        run = self._run = JITFunction.run

        def compile_only(function, *args, grid, warmup, **kwargs):
            kernel = run(function, *args, grid=grid, warmup=True, **kwargs)
            self.rows.setdefault(kernel.hash, _row(function.__name__, kernel, kwargs))
            return kernel

        JITFunction.run = compile_only
        return self

    def __exit__(self, *_: object) -> None:
        JITFunction.run = self._run


def _row(name: str, kernel, kwargs: dict[str, Any]) -> dict[str, Any]:
    registers, stack = _resources(kernel.asm["cubin"])
    ptx = kernel.asm["ptx"]
    return {
        "kernel": name.strip("_"),
        "variant": " ".join(f"{key}={kwargs[key]}" for key in SHOWN if key in kwargs),
        "warps": kernel.metadata.num_warps,
        "registers": registers,
        "spilled": stack,
        "shared": kernel.metadata.shared,
        "wgmma": ptx.count("wgmma.mma_async"),
        "mma": ptx.count("mma.sync"),
        "cp.async": ptx.count("cp.async.c"),
    }


def _resources(cubin: bytes) -> tuple[int, int]:
    """(registers, bytes of stack) per thread, as Triton's own cuobjdump says."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", said).groups()  # type: ignore[union-attr]
    return int(registers), int(stack)


def tensor(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def weight(*shape: int, dtype: torch.dtype) -> Weight:
    if dtype == torch.uint8:  # fp4
        return Weight(*(tensor(*shape[:-1], shape[-1] // each, dtype=dtype) for each in (2, FP4_BLOCK)))
    blocks = (*shape[:-2], -(-shape[-2] // 128), -(-shape[-1] // 128))
    scales = {torch.float8_e4m3fn: blocks, torch.int8: shape[:-1]}.get(dtype)
    return Weight(tensor(*shape, dtype=dtype), None if scales is None else tensor(*scales, dtype=torch.float32))


def norms() -> None:
    x, scale = tensor(128, HIDDEN), tensor(HIDDEN)
    cuda.rms_norm(x, scale, 1e-6)
    cuda.add_rms_norm(x, x, scale, 1e-6)
    cuda.silu_mul(tensor(128, 2 * WIDTH))
    position = tensor(128, dtype=torch.int64)
    rotation, latent_norm = Rotation(tensor(4096, ROPE, dtype=torch.float32), position, True), tensor(LATENT)
    cuda.rope(tensor(128, HEADS, ROPE), rotation)
    for dtype in (torch.bfloat16, torch.uint8, torch.float32):
        pages = tensor(16, 64, KVFormat(LATENT, ROPE, dtype).width, dtype=dtype)
        kv = tensor(128, LATENT + ROPE, dtype=torch.float32 if dtype == torch.float32 else torch.bfloat16)
        cuda.cache_insert(pages, position, kv, ROPE)
        cuda.latent_insert(pages, position, kv, latent_norm, 1e-6, rotation)
    silu.silu_mul_quantize(tensor(128, 2 * WIDTH))
    norm.rms_norm_quantize(x, scale, 1e-6, 16)
    cuda.add_rows(x, x, x)
    cuda.sum_rows(tensor(1024, HIDDEN), tensor(128, 8, dtype=torch.int64), tensor(128, 8, dtype=torch.float32))
    logits, bias = tensor(128, 256, dtype=torch.float32), tensor(256, dtype=torch.float32)
    cuda.gate_topk(logits, bias, GateRule("sigmoid", 8, 8, 4, True, 2.5))


def linear() -> None:
    for rows in (1, 32, 128):
        cuda.linear(tensor(rows, HIDDEN), weight(2112, HIDDEN, dtype=torch.float8_e4m3fn))
    for dtype in (torch.float8_e4m3fn, torch.int8):
        cuda.linear(tensor(8, HIDDEN, dtype=torch.float32), weight(2112, HIDDEN, dtype=dtype))
    for rows in (1, 32, 4096):
        cuda.linear(tensor(rows, HIDDEN), weight(2112, HIDDEN, dtype=torch.int8))
    cuda.silu_linear(tensor(8, 2 * WIDTH), weight(HIDDEN, WIDTH, dtype=torch.int8))
    norm_weight = tensor(HIDDEN)
    cuda.norm_linear(tensor(8, HIDDEN), norm_weight, 1e-6, weight(2112, HIDDEN, dtype=torch.int8))


def experts() -> None:
    count = tensor(EXPERTS, dtype=torch.int32)
    for x_dtype, w_dtype in (
        (torch.bfloat16, torch.float8_e4m3fn),
        (torch.bfloat16, torch.int8),
        (torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.uint8),
        (torch.float32, torch.float32),
        (torch.float32, torch.uint8),
    ):
        w13 = weight(EXPERTS, 2 * WIDTH, HIDDEN, dtype=w_dtype)
        w2 = weight(EXPERTS, HIDDEN, WIDTH, dtype=w_dtype)
        for rows in (8, 32, 64):
            cuda.grouped_experts(tensor(EXPERTS * rows, HIDDEN, dtype=x_dtype), count, w13, w2, None, count)
    rooms = [32] * EXPERTS
    h, scale = (
        tensor(sum(rooms), WIDTH, dtype=torch.float8_e4m3fn),
        tensor(sum(rooms), WIDTH // 128, dtype=torch.float32),
    )
    experts_cublas.scale_columns(scale, count, rooms)
    experts_cublas.silu_mul_quantize_padded(tensor(128, 2 * WIDTH), 0, h, scale, count)


def attention() -> None:
    table_BP, length = tensor(32, 64, dtype=torch.int32), tensor(32, dtype=torch.int32)
    for dtype in (torch.bfloat16, torch.float32):
        pages = tensor(100, 64, LATENT + ROPE, dtype=dtype)
        q, r = tensor(32, HEADS, LATENT, dtype=dtype), tensor(32, HEADS, ROPE, dtype=dtype)
        for splits in (1, 4):
            mla_triton.attend(q, r, PagedContext(pages, table_BP, length), 0.1, splits)
        mla_triton.attend(q, r, PagedContext(pages, table_BP[:3], length[:3], length[:4]), 0.1)
    entry = KVFormat(LATENT, ROPE, torch.uint8)
    pages = tensor(100, 64, entry.width, dtype=torch.uint8)
    context = PagedContext(pages, table_BP, length)
    mla_triton.attend(tensor(32, HEADS, LATENT), tensor(32, HEADS, ROPE), context, 0.1, 4)
    q, w_kv_b = tensor(4096, HEADS, 192), tensor(HEADS * 256, LATENT)
    for cache in (pages, tensor(100, 64, LATENT + ROPE)):
        context = PagedContext(cache, table_BP[:3], length[:3], length[:4])
        mla_expanded.attend_prompts(q[..., :128], q[..., 128:], context, w_kv_b, 0.1)


PARTS: dict[str, Callable[[], None]] = {f.__name__: f for f in (norms, linear, experts, attention)}


def main(names: list[str]) -> int:
    unknown = set(names) - set(PARTS)
    if unknown:
        print(f"no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}", file=sys.stderr)
        return 2
    grouped_gemm.count_sms = lambda device: 132
    sys.modules["eprt.ops.cuda.linear"].count_sms = grouped_gemm.count_sms  # type: ignore[attr-defined]
    with CompiledOnly() as compiled:
        for name in names or PARTS:
            PARTS[name]()
    print(table(list(compiled.rows.values())))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
