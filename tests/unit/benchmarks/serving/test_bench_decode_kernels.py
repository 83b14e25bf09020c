"""The order of a layer's kernels, and the gaps between them."""

import pytest

pytest.importorskip("triton")

from benchmarks.serving.bench_decode_kernels import LAST_OF_LAYER, KernelRun, layer_sequence


def test_gaps_are_what_no_kernel_fills():
    """Of the kind of layer that there are most of; kernels that overlap leave no gap."""
    dense = [(0.0, 1.0, "a"), (3.0, 4.0, LAST_OF_LAYER)]
    layer = [(0.5, 4.0, "a"), (1.0, 2.0, "beside"), (6.5, 8.0, LAST_OF_LAYER)]
    spans = dense + [(begin + at, end + at, name) for at in (4.0, 12.0, 20.0) for begin, end, name in layer]
    assert layer_sequence(spans) == [
        KernelRun("a", 3.5, 0.5),
        KernelRun("beside", 1.0, 0.0),
        KernelRun(LAST_OF_LAYER, 1.5, 2.5),
    ]
