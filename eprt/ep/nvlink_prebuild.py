"""Fills the kernel cache ahead of time: `eprt env --build-kernels`, also on a machine without a GPU.

Other shapes compile on first use, a second or two each.
"""

from collections.abc import Iterator
from itertools import product
from pathlib import Path

from eprt import env
from eprt.ep.nvlink_layout import HeapShape
from eprt.ep.nvlink_low_latency import PAYLOAD_DTYPES, kernel_sources
from eprt.gpu.jit import cubin

MODELS = ((7168, 8), (5120, 6), (2048, 6))  # (hidden, top-k): DeepSeek V3 and R1; V2; V2-Lite
RANKS = (1, 2, 4, 8)


def build(arch: str = "sm_90a") -> Iterator[str]:
    """Compiles what is not there yet; yields a line per kernel. Raises ImportError when NVRTC is not installed."""
    for (hidden, top_k), ranks, payload in product(MODELS, RANKS, PAYLOAD_DTYPES):
        # Of a shape, kernels know hidden, top_k, num_ranks and payload; the rest is given to them call by call.
        shape = HeapShape(ranks, 1, hidden, top_k, 1, payload, exact=False, num_buffers=2)
        for name, source in kernel_sources(shape, arch=arch).items():
            yield f"{source.name} {arch} hidden {hidden} top-k {top_k} ranks {ranks} {name}: {len(cubin(source))} B"
    yield f"kernel cache: {Path(env.get('EPRT_KERNEL_CACHE')).expanduser()}"
