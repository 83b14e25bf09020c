"""Fills the kernel cache ahead of time: `eprt env --build-kernels`, also on a machine without a GPU.

Normal mode's kernels serve all shapes. Low latency's know theirs; other shapes compile on first use, a second or two
each. Dense products' are those that were measured to be the fastest (ops/tunings). Two serve all bfloat16 experts.
"""

from collections.abc import Iterator
from itertools import product

from eprt.ep.nvlink import meeting
from eprt.ep.nvlink import normal as nvlink_normal
from eprt.ep.nvlink.low_latency import PAYLOAD_DTYPES, kernel_sources
from eprt.ep.nvlink.low_latency_layout import LowLatencyHeap
from eprt.gpu import (
    cluster_product,
    grouped_product,
    index_choose,
    index_scores,
    mla_decode,
    mla_decode_fp8,
    prompt_attention,
)
from eprt.gpu.jit import KernelSource, cache_dir, cubin
from eprt.ops.tuning import cluster_tilings

ARCHITECTURES = ("sm_80", "sm_90a", "sm_100a")  # that are tested to compile; sm_80 without bulk copies
MODELS = ((7168, 8), (5120, 6), (2048, 6))  # (hidden, top-k): DeepSeek V3 and R1; V2; V2-Lite
RANKS = (1, 2, 4, 8)


def sources(arch: str = "sm_90a") -> Iterator[tuple[str, KernelSource]]:
    """(what for, source) of every kernel that is built ahead."""
    for ranks in RANKS:
        for grouped in (False, True):
            for source in nvlink_normal.kernel_sources(ranks, grouped=grouped, arch=arch):
                yield f"ranks {ranks} normal mode, rows by {'expert' if grouped else 'token'}", source
        yield f"ranks {ranks} meeting of a team", meeting.source(ranks, arch)
        yield f"ranks {ranks} DeepEP's interface", KernelSource("dispatch_layout", arch, (("NUM_RANKS", ranks),))
    # Of a shape, kernels know hidden, top_k, num_ranks and payload; the rest is given to them call by call.
    for (hidden, top_k), ranks in product(MODELS, RANKS):
        shapes = {payload: LowLatencyHeap(ranks, 1, hidden, top_k, 1, payload, False, 2) for payload in PAYLOAD_DTYPES}
        shapes["DeepEP's interface"] = LowLatencyHeap(ranks, 1, hidden, top_k, 1, "either", False, 2, late_weights=True)
        for what, shape in shapes.items():
            for name, source in kernel_sources(shape, arch=arch).items():
                yield f"hidden {hidden} top-k {top_k} ranks {ranks} {what}: {name}", source
    for gated in (True, False) if arch == grouped_product.ARCH else ():
        yield f"bf16 experts, {'gate and up' if gated else 'down'}", grouped_product.source(gated)
    for shape, rows, tiling in cluster_tilings() if arch == cluster_product.ARCH else ():
        source = cluster_product.source(cluster_product.tokens_of(rows), tiling)
        yield f"fp8 product {shape.n} x {shape.k} of {rows} rows", source
    for ctas in (1, 2) if arch == mla_decode.ARCH else ():
        for source in mla_decode.sources(ctas).values():
            yield f"latent attention, clusters of {ctas}", source
        for terms in (1, 2):
            for source in mla_decode_fp8.sources(ctas, terms).values():
                yield f"latent attention over an fp8 cache, clusters of {ctas}, queries as {terms}", source
        yield f"latent attention to chosen tokens, clusters of {ctas}", mla_decode.sources(ctas, True)["mla_decode"]
        for terms in (1, 2):
            source = mla_decode_fp8.sources(ctas, terms, True)["attention"]
            yield f"latent attention to chosen tokens, fp8 cache, clusters of {ctas}, queries as {terms}", source
    for queries in index_scores.QUERIES if arch == index_scores.ARCH else ():
        yield f"indexer's scores, {queries} queries", index_scores.source(queries)
    for ctas, words in product(index_choose.CTAS, index_choose.SIZES) if arch == index_choose.ARCH else ():
        yield f"indexer's choice, {ctas} thread blocks of a row of {32 * words}", index_choose.source(ctas, words)
    if arch == prompt_attention.ARCH:
        yield "attention of prompts", prompt_attention.source()


def build(arch: str = "sm_90a") -> Iterator[str]:
    """Compiles what is not there yet; yields a line per kernel. Raises ImportError when NVRTC is not installed."""
    for what, source in sources(arch):
        yield f"{source.name} {arch} {what}: {len(cubin(source))} B"
    yield f"kernel cache: {cache_dir()}"
