"""GpuTimer: times calls of several ranks on their GPUs, competitors in turns, from the same starting line."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import torch

from benchmarks.tools.timing import Timing, quantile
from eprt import EPGroup
from eprt.ep.config import EPConfig
from eprt.ep.nvlink.low_latency_backend import NvlinkLowLatencyBackend
from eprt.ep.nvlink.options import NvlinkOptions

Call = Callable[[], object]


class GpuTimer:
    """Before each sequence of calls: a cold L2, the host ahead of the GPU, and all ranks' GPUs at the same point,
    brought there by a dispatch and combine of no tokens."""

    def __init__(self, group: EPGroup):
        self.group = group
        tiny = EPConfig(16, group.size, 1, 1, mode="low_latency", device="cuda")
        self._meeting = NvlinkLowLatencyBackend(tiny, group, NvlinkOptions(num_sms=1))
        self._nobody = (
            torch.empty(0, 16, dtype=torch.bfloat16, device="cuda"),
            torch.empty(0, 1, dtype=torch.int32, device="cuda"),
            torch.empty(0, 1, dtype=torch.float32, device="cuda"),
        )
        self._flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")

    def meet(self) -> None:
        """All ranks' GPUs get here together, within a flag's way."""
        handle, received = self._meeting.dispatch(*self._nobody)
        self._meeting.combine(received.x_RH, handle)

    def ready(self) -> None:
        torch.cuda.synchronize()
        self.group.barrier()
        self._flush.zero_()
        torch.cuda._sleep(600_000)
        self.meet()

    def in_turns(self, sequences: Mapping[str, Sequence[Call]], samples: int) -> dict[str, list[Timing]]:
        """Time of each call of each sequence, from event to event; the sequences alternate, their order turns.

        Medians and quantiles are of the rank whose median is largest.
        """
        names = list(sequences)
        events: dict[str, list[list[torch.cuda.Event]]] = {name: [] for name in names}
        for turn in range(samples + 3):
            for i in range(len(names)):
                name = names[(turn + i) % len(names)]
                row = [torch.cuda.Event(enable_timing=True) for _ in range(len(sequences[name]) + 1)]
                self.ready()
                row[0].record()
                for call, event in zip(sequences[name], row[1:]):
                    call()
                    event.record()
                if turn >= 3:
                    events[name].append(row)
        torch.cuda.synchronize()
        mine = {
            name: [[row[i].elapsed_time(row[i + 1]) / 1e3 for row in rows] for i in range(len(sequences[name]))]
            for name, rows in events.items()
        }
        everyone = self.group.allgather(mine)
        return {
            name: [
                Timing.from_samples(max((ranks[name][i] for ranks in everyone), key=statistics.median))
                for i in range(len(sequences[name]))
            ]
            for name in names
        }

    def kernels_in_turns(self, sequences: Mapping[str, Sequence[Call]], samples: int = 20) -> dict[str, list[float]]:
        """Median us of each call's kernel as CUPTI sees it, what DeepEP's tests print; the largest over the ranks.

        Each call launches one kernel with "::dispatch" or "::combine" in its name. {} where CUPTI is not at hand.
        """
        expected: list[str] = []
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for _ in range(samples):
                for name, calls in sequences.items():
                    self.ready()
                    for call in calls:
                        call()
                    expected += ["meeting", "meeting", *[name] * len(calls)]
            torch.cuda.synchronize()
        kernels = [e for e in profile.events() or () if "::dispatch" in e.name or "::combine" in e.name]
        kernels.sort(key=lambda event: event.time_range.start)
        if not all(self.group.allgather(len(kernels) == len(expected))):
            return {}
        result = {}
        for name, calls in sequences.items():
            own = [event.time_range.elapsed_us() for event, whose in zip(kernels, expected) if whose == name]
            medians = [statistics.median(own[i :: len(calls)]) for i in range(len(calls))]
            result[name] = [max(column) for column in zip(*self.group.allgather(medians))]
        return result

    def chains(self, sequences: Mapping[str, Sequence[Call]], repeats: int, samples: int) -> dict[str, list[float]]:
        """us of one whole sequence, for each sample: `repeats` of them in one CUDA graph, replayed in turns, warm."""
        graphs = {}
        for name, calls in sequences.items():
            self.ready()
            for call in calls:
                call()
            torch.cuda.synchronize()
            self.group.barrier()
            graphs[name] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graphs[name]):
                for _ in range(repeats):
                    for call in calls:
                        call()
        spans: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in graphs}
        names = list(graphs)
        for turn in range(samples + 3):
            for i in range(len(names)):
                name = names[(turn + i) % len(names)]
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                self.ready()
                begin.record()
                graphs[name].replay()
                end.record()
                if turn >= 3:
                    spans[name].append((begin, end))
        torch.cuda.synchronize()
        return {name: [b.elapsed_time(e) * 1e3 / repeats for b, e in row] for name, row in spans.items()}

    def host_us(self, call: Call, calls: int = 30, bursts: int = 15) -> float:
        """Host time of one call, launches not waited for: median of short bursts, which the GPU's queue has room for;
        the largest over the ranks."""
        spent = []
        for _ in range(bursts + 2):
            torch.cuda.synchronize()
            self.group.barrier()
            start = time.perf_counter()
            for _ in range(calls):
                call()
            spent.append((time.perf_counter() - start) / calls * 1e6)
        torch.cuda.synchronize()
        return max(self.group.allgather(statistics.median(spent[2:])))

    def close(self) -> None:
        self._meeting.close()


def difference(a: Sequence[float], b: Sequence[float]) -> tuple[float, float, float]:
    """Median of the paired differences a - b, and the ends of its 95 % interval (by the quartiles' distance)."""
    ordered = sorted(x - y for x, y in zip(a, b))
    half = 1.57 * (quantile(ordered, 0.75) - quantile(ordered, 0.25)) / len(ordered) ** 0.5
    median = statistics.median(ordered)
    return median, median - half, median + half
