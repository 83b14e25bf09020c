"""Times of calls on one GPU, as CUDA graphs, and the rates that floors are computed with."""

from collections.abc import Callable, Mapping, Sequence

import torch

from benchmarks.tools.timing import Timing
from eprt.engine.graphs import DecodeGraphs
from eprt.layers.batch import ForwardBatch


def gpu_time(calls: Sequence[Callable[[], object]], samples: int = 15) -> Timing:
    """Seconds of one call. Several calls, on different data, make one graph: caches are cold and launches free."""
    return gpu_times_in_turns({"": calls}, samples)[""]


def gpu_times_in_turns(
    candidates: Mapping[str, Sequence[Callable[[], object]]], samples: int = 15
) -> dict[str, Timing]:
    """As gpu_time, for several candidates that take turns."""
    graphs = {name: recorded(calls) for name, calls in candidates.items()}
    spans: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in graphs}
    for _ in range(samples + 2):
        for name, graph in graphs.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            spans[name].append((begin, end))
    torch.cuda.synchronize()
    return {
        name: Timing.from_samples([b.elapsed_time(e) / 1e3 / len(candidates[name]) for b, e in row[2:]])
        for name, row in spans.items()
    }


def recorded(calls: Sequence[Callable[[], object]]) -> torch.cuda.CUDAGraph:
    """One graph of the calls, each called once before."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def gpu_time_of_replay(graphs: DecodeGraphs, batch: ForwardBatch, samples: int = 20) -> Timing:
    spans = []
    for _ in range(samples + 2):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graphs.run(batch)
        end.record()
        spans.append((begin, end))
    torch.cuda.synchronize()
    return Timing.from_samples([b.elapsed_time(e) / 1e3 for b, e in spans[2:]])


def gpu_word() -> str:
    """Of "NVIDIA H200": h200, for names of results."""
    return torch.cuda.get_device_name().removeprefix("NVIDIA ").split()[0].lower()


def bandwidth() -> float:
    """Bytes per second of a copy (read and written counted) or of a sum, whichever is larger."""
    a, b = (torch.randn(1 << 29, device="cuda") for _ in range(2))
    copied, read = gpu_time([lambda: b.copy_(a)]), gpu_time([lambda: a.sum()])
    return max(2 * a.nbytes / copied.median_s, a.nbytes / read.median_s)


def matrix_rate() -> float:
    """bf16 operations per second of a large product of random matrices."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * 8192**3 / gpu_time([lambda: a @ b]).median_s
