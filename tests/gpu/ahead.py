"""Compiles the exchange's kernels ahead of the cases that launch them: `python -m tests.gpu.ahead 1 4`.

The runner (benchmarks/suite) starts this beside tests that launch other kernels. What is not compiled in time, or not
listed here, is compiled by the case that needs it. Knows the cases' shapes, and nothing of launching.
"""

import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor

from eprt.ep.nvlink import low_latency, normal
from eprt.ep.nvlink.low_latency_layout import LowLatencyHeap
from eprt.gpu.jit import KernelSource, cubin
from tests.gpu import cases_deep_ep_low_latency, cases_low_latency


def sources(ranks: Iterable[int], arch: str) -> Iterator[KernelSource]:
    """Of every number of ranks: normal mode first, which is the same for all shapes."""
    for num_ranks in ranks:
        for grouped, exact in ((False, False), (True, False), (True, True)):
            yield from normal.kernel_sources(num_ranks, grouped=grouped, exact=exact, arch=arch)
        yield KernelSource("dispatch_layout", arch, (("NUM_RANKS", num_ranks),))
        for heap in _heaps(num_ranks):
            yield from low_latency.kernel_sources(heap, arch=arch).values()


def _heaps(num_ranks: int) -> Iterator[LowLatencyHeap]:
    """What the kernels of low latency know of a shape; the rest is given to them call by call."""
    for hidden, _, top_k, _, payload, exact in cases_low_latency.SHAPES:
        yield LowLatencyHeap(num_ranks, 1, hidden, top_k, 1, "fp8" if payload == "fp8" else "bf16", exact, 2)
    for hidden, _, top_k, _ in cases_deep_ep_low_latency.SHAPES:
        for exact in (False, True):
            yield LowLatencyHeap(num_ranks, 1, hidden, top_k, 1, "either", exact, 2, late_weights=not exact)


def build(source: KernelSource) -> int:
    """The size of the binary."""
    return len(cubin(source))


def main() -> None:
    from eprt.gpu.device import this_arch

    wanted = dict.fromkeys(sources([int(text) for text in sys.argv[1:]], this_arch()))
    with ProcessPoolExecutor() as pool:
        sizes = list(pool.map(build, wanted))
    print(f"{len(sizes)} kernels of the exchange compiled ahead, {sum(sizes) >> 10} KB")


if __name__ == "__main__":
    main()
