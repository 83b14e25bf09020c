"""Attention of decodes, DeepSeek-V3's 128 heads, over bfloat16 and fp8 caches, by every kernel that is installed.

The schedule, which a step makes once for all layers, is timed by itself. `mixed`: 120 requests of 60 to 8604 tokens.
FlashMLA is a peer as well as a backend: pip install --no-deps sgl-flash-mla.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.graph_timer import gpu_time, gpu_word
from benchmarks.gpu.random_inputs import latent_cache
from benchmarks.shapes import HEADS, LATENT, ROPE
from benchmarks.tools.report import BenchmarkReport
from eprt import EPGroup
from eprt.gpu.device import take_device
from eprt.ops.attention import PagedContext
from eprt.ops.cuda import attention

NUM_RANKS = 0
NEEDS_GPU = True
NEEDS = "FlashMLA where installed"

SHAPES: dict[str, list[int]] = {
    "32 x 4096": [4096] * 32,
    "64 x 4096": [4096] * 64,
    "128 x 4096": [4096] * 128,
    "16 x 32768": [32768] * 16,
    "1 x 32768": [32768],
    "mixed": [60 + 89 * (7919 * i % 97) for i in range(120)],
}
COPIES = 3  # of the cache, in turns: none of them is in L2


def contexts(lengths: list[int], fp8: bool = False) -> list[PagedContext]:
    """The same lengths in several caches."""
    pages = -(-max(lengths) // 64)
    table = torch.randperm(len(lengths) * pages, device="cuda").int().view(len(lengths), pages)
    length = torch.tensor(lengths, dtype=torch.int32, device="cuda")
    copies = (latent_cache(table.numel() * 64, fp8) for _ in range(COPIES))
    return [PagedContext(cache, table, length) for cache in copies]


def main() -> None:
    take_device("cuda", EPGroup.single())
    torch.manual_seed(0)
    device = {"device": torch.cuda.get_device_name(), "gpus": 1, "torch": torch.__version__}
    report = BenchmarkReport(f"latent_attention_{gpu_word()}", device)
    for shape, lengths in SHAPES.items():
        q = torch.randn(len(lengths), HEADS, LATENT + ROPE, device="cuda", dtype=torch.bfloat16)
        for fp8 in (False, True):
            where = contexts(lengths, fp8)
            for name in attention.installed():
                if attention.kernels(name)[0].refusal(q[..., :LATENT], q[..., LATENT:], where[0]) is None:
                    add_row(report, name, shape, lengths, q, where)
            del where
            torch.cuda.empty_cache()
    report.finish()


def add_row(
    report: BenchmarkReport, name: str, shape: str, lengths: list[int], q: Tensor, where: list[PagedContext]
) -> None:
    kernel, plans = attention.kernels(name)[0], dict[str, Any]()
    queries = q[..., :LATENT], q[..., LATENT:]

    def call(context: PagedContext, plans: dict[str, Any] | None) -> Callable[[], Tensor]:
        return partial(kernel.attend, *queries, context, 0.1, plans=plans)

    alone = gpu_time([call(context, plans) for context in where])
    planned = gpu_time([call(context, None) for context in where])
    entries, operations, cache = sum(lengths), 2 * HEADS * (2 * LATENT + ROPE), where[0].kv_pages
    report.add_row(
        what=f"{shape}, {name}" + (", fp8 cache" if cache.dtype == torch.uint8 else ""),
        rows=len(lengths),
        **alone.columns("eprt"),
        schedule_us=(planned.median_s - alone.median_s) * 1e6,
        tflops=entries * operations / alone.median_s / 1e12,
        GBps=entries * cache.shape[2] * cache.element_size() / alone.median_s / 1e9,
    )


if __name__ == "__main__":
    main()
