"""WireOptions: text, fields and refusals."""

import pytest

from eprt.ep.wire.options import WireOptions


def test_text_gives_fields():
    assert WireOptions.from_text("tcp") == WireOptions()
    assert WireOptions.from_text("tcp:threads=3,arena_kib=64") == WireOptions(threads=3, arena_kib=64)
    assert WireOptions.from_text("nvshmem:threads=2") == WireOptions("tcp", threads=2, gpu="nvshmem")
    assert WireOptions.from_text("nvshmem:copies=node") == WireOptions("tcp", gpu="nvshmem", copies="node")
    paced = WireOptions.from_text("paced:gbps=12.5,latency_us=3,reorder_us=50,repeat_words=0.25,seed=4")
    assert paced == WireOptions("paced", gbps=12.5, latency_us=3, reorder_us=50, repeat_words=0.25, seed=4)
    pace = paced.pace()
    assert (pace.bytes_per_ns, pace.latency_ns, pace.reorder_ns, pace.repeat_words, pace.seed) == (
        12.5,
        3000,
        50000,
        0.25,
        4,
    )


@pytest.mark.parametrize(
    "text, words",
    [
        ("verbs", "wire 'verbs': must be one of tcp, paced, nvshmem; verbs and EFA are not built yet"),
        ("", "wire '': must be one of tcp, paced"),
        ("tcp:speed=3", "no setting 'speed'; there are threads, ring, arena_kib"),
        ("tcp:threads=two", "threads='two' is not a number"),
        ("tcp:threads=0", "threads=0: must be at least 1"),
        ("tcp:ring=48", "ring=48: must be a power of 2"),
        ("tcp:gbps=3", "gbps is of the paced wire alone"),
        ("tcp:copies=node", "copies is of the nvshmem wire alone"),
        ("nvshmem:copies=twice", "copies='twice': must be one of auto, rank, node"),
        ("paced:gbps=-1", "gbps=-1: must be a number of at least 0"),
        ("paced:latency_us=inf", "latency_us=inf: must be a number of at least 0"),
    ],
)
def test_refusals_name_value_and_remedy(text, words):
    with pytest.raises(ValueError) as caught:
        WireOptions.from_text(text)
    assert words in str(caught.value)
