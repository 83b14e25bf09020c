"""Fills the kernel cache ahead of time: `eprt env --build-kernels`, also on a machine without a GPU.

Other shapes compile on first use, a second or two each.
"""

from collections.abc import Iterator
from itertools import product
from pathlib import Path

from eprt import env
from eprt.ep.nvlink_low_latency import kernel_sources
from eprt.gpu.jit import cubin

MODELS = ((7168, 8), (5120, 6), (2048, 6))  # (hidden, top-k): DeepSeek V3 and R1; V2; V2-Lite
RANKS = (1, 2, 4, 8)


def build(arch: str = "sm_90a") -> Iterator[str]:
    """Compiles what is not there yet; yields a line per kernel. Raises ImportError when NVRTC is not installed."""
    for (hidden, top_k), ranks, fp8 in product(MODELS, RANKS, (True, False)):
        for source in kernel_sources(hidden, top_k, ranks, fp8=fp8, exact=False, arch=arch):
            payload = "fp8" if fp8 else "bf16"
            yield f"{source.name} {arch} hidden {hidden} top-k {top_k} ranks {ranks} {payload}: {len(cubin(source))} B"
    yield f"kernel cache: {Path(env.get('EPRT_KERNEL_CACHE')).expanduser()}"
