"""Dispatch and combine between GPUs: `mpirun -n 4 python -m benchmarks.bench_ep [--profile]`.

Times are of the GPU, from events around one call on a cold L2, all ranks started together by a dispatch of no tokens;
the call's own share of it (event to event with an empty launch) is a column. Of the ranks' medians the largest counts.
Floor: bytes that must cross (each token once to each other rank it goes to, each sum back once) over 450 GB/s.
GB/s are logical, as DeepEP counts: the payload of every (token, expert) pair, over the time.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks.report import Report
from eprt import EPGroup
from eprt.ep.api import EPConfig
from eprt.ep.nvlink import NvlinkBackend

LINK_GB_S = 450.0
SAMPLES = 60
TOKENS = (1, 8, 32, 64, 128, 256)
STAGES = {
    "dispatch": {
        0: "start", 1: "routing read", 2: "counts sent", 3: "tokens stored", 5: "receive begins",
        6: "counts here", 7: "rows placed", 8: "done",
    },
    "combine": {0: "start", 4: "sent", 8: "done"},
}  # fmt: skip


class Case:
    """One batch of one rank, and the calls that are timed."""

    def __init__(self, group: EPGroup, config: EPConfig, num_tokens: int, profile: bool = False, stats: bool = True):
        self.backend = NvlinkBackend(config, group, profile=profile, stats=stats)
        self.config, self.num_tokens = config, num_tokens
        generator = torch.Generator("cuda").manual_seed(group.rank)
        scores = torch.rand(num_tokens, config.num_slots, device="cuda", generator=generator)
        self.slots = scores.topk(config.top_k).indices
        self.weights = torch.rand(num_tokens, config.top_k, device="cuda", generator=generator)
        self.x = torch.randn(num_tokens, config.hidden_size, device="cuda", generator=generator).bfloat16()
        self.y = torch.randn(self.backend.max_rows, config.hidden_size, device="cuda", generator=generator).bfloat16()
        self.handle: Any = None

    def dispatch(self) -> None:
        self.handle, _ = self.backend.dispatch(self.x, self.slots, self.weights)

    def combine(self) -> None:
        self.backend.combine(self.y, self.handle)

    def dispatch_send(self) -> None:
        self.handle = self.backend.dispatch_send(self.x, self.slots, self.weights)

    def dispatch_recv(self) -> None:
        self.backend.dispatch_recv(self.handle)

    def combine_send(self) -> None:
        self.backend.combine_send(self.y, self.handle)

    def combine_recv(self) -> None:
        self.backend.combine_recv(self.handle)

    def remote_copies(self, group: EPGroup) -> int:
        """(token, other rank) pairs of this rank's tokens."""
        ranks = self.slots // (self.config.num_slots // group.size)
        return sum(int((ranks == r).any(1).sum()) for r in range(group.size) if r != group.rank)


class Timer:
    """Events around calls, with a cold L2 and the ranks brought together before each."""

    def __init__(self, group: EPGroup):
        self.group = group
        tiny = EPConfig(16, group.size, 1, 1, mode="low_latency", device="cuda", num_sms=1)
        self._meeting = NvlinkBackend(tiny, group)
        self._nobody = (
            torch.empty(0, 16, dtype=torch.bfloat16, device="cuda"),
            torch.empty(0, 1, dtype=torch.int32, device="cuda"),
            torch.empty(0, 1, device="cuda"),
        )
        self._flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")

    def meet(self) -> None:
        """All ranks' GPUs get here together, within a flag's way."""
        handle, received = self._meeting.dispatch(*self._nobody)
        self._meeting.combine(received.x_RH, handle)

    def ready(self) -> None:
        """Cold L2, the host ahead of the GPU, and all ranks' GPUs at the same point."""
        torch.cuda.synchronize()
        self.group.barrier()
        self._flush.zero_()
        torch.cuda._sleep(400_000)
        self.meet()

    def together(self, *calls: Callable[[], None], samples: int = SAMPLES) -> list[float]:
        """Median us of each call of a sequence, launched back to back; the largest over the ranks."""
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(len(calls) + 1)] for _ in range(samples + 5)]
        for row in events:
            self.ready()
            row[0].record()
            for call, event in zip(calls, row[1:]):
                call()
                event.record()
        torch.cuda.synchronize()
        medians = [
            statistics.median(row[i].elapsed_time(row[i + 1]) * 1e3 for row in events[5:]) for i in range(len(calls))
        ]
        return [max(column) for column in zip(*self.group.allgather(medians))]

    def turns(self, *sequences: Sequence[Callable[[], None]]) -> list[float]:
        """Median us of each whole sequence, taken in turns; the largest over the ranks."""
        spans: list[list[Any]] = [[] for _ in sequences]
        for _ in range(SAMPLES):
            for calls, seen in zip(sequences, spans):
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                self.ready()
                begin.record()
                for call in calls:
                    call()
                end.record()
                seen.append((begin, end))
        torch.cuda.synchronize()
        medians = [statistics.median(b.elapsed_time(e) * 1e3 for b, e in seen) for seen in spans]
        return [max(column) for column in zip(*self.group.allgather(medians))]

    def kernel_us(self, *calls: Callable[[], None], samples: int = 20) -> list[float]:
        """Median duration of each call's kernel, as CUPTI sees it (what DeepEP's tests print); [] without CUPTI."""
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for _ in range(samples):
                self.ready()
                for call in calls:
                    call()
            torch.cuda.synchronize()
        kernels = [event for event in profile.events() or () if "eprt::low_latency::" in event.name]
        kernels.sort(key=lambda event: event.time_range.start)
        every = 2 + len(calls)  # the meeting's two come first
        seen = len(kernels) == every * samples
        if not all(self.group.allgather(seen)):
            return []
        medians = [
            statistics.median(kernels[n * every + 2 + i].time_range.elapsed_us() for n in range(samples))
            for i in range(len(calls))
        ]
        return [max(column) for column in zip(*self.group.allgather(medians))]

    def host_us(self, call: Callable[[], None], calls: int = 400) -> float:
        """Host time of one call, launches not waited for."""
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        spent = time.perf_counter() - start
        torch.cuda.synchronize()
        return spent / calls * 1e6

    def close(self) -> None:
        self._meeting.close()


def low_latency_row(group: EPGroup, timer: Timer, config: EPConfig, num_tokens: int) -> dict[str, Any]:
    case = Case(group, config, num_tokens)
    dispatch, combine = timer.together(case.dispatch, case.combine)
    send, recv, back, summed = timer.together(
        case.dispatch_send, case.dispatch_recv, case.combine_send, case.combine_recv, samples=20
    )
    kernel_times = timer.kernel_us(case.dispatch, case.combine)
    empty = timer.together(lambda: None, samples=20)[0]

    def pair() -> None:
        case.dispatch()
        case.combine()

    def launches() -> None:
        kernels.dispatch(0, case.x, case.slots, case.weights, 3)
        kernels.combine_recv(0, case.slots, case.weights, out, case.y)

    kernels, out = case.backend.kernels, torch.empty_like(case.x)
    host, launch = timer.host_us(pair) / 2, timer.host_us(launches) / 2
    bare = Case(group, config, num_tokens, stats=False)
    with_stats, without = timer.turns((case.dispatch, case.combine), (bare.dispatch, bare.combine))
    copies = max(group.allgather(case.remote_copies(group)))
    hidden, pairs = config.hidden_size, num_tokens * config.top_k
    message = case.backend.kernels.shape.message_bytes if config.payload == "fp8" else hidden * 2
    floor_dispatch, floor_combine = (copies * size / LINK_GB_S / 1e3 for size in (message, hidden * 2))
    row = {
        "tokens": num_tokens,
        "dispatch_us": dispatch,
        "combine_us": combine,
        "empty_us": empty,
        **dict(zip(("dispatch_kernel_us", "combine_kernel_us"), kernel_times)),
        "dispatch_GB_s": pairs * message / dispatch / 1e3,
        "combine_GB_s": pairs * hidden * 2 / combine / 1e3,
        "dispatch_to_floor": dispatch / floor_dispatch if floor_dispatch else float("nan"),
        "combine_to_floor": combine / floor_combine if floor_combine else float("nan"),
        "send_us": send,
        "recv_us": recv,
        "combine_send_us": back,
        "combine_recv_us": summed,
        "stats_us": with_stats - without,
        "verb_host_us": host,
        "launch_host_us": launch,
        "sms": case.backend.num_sms,
        "buffer_bytes": case.backend.kernels.shape.num_bytes,
    }
    case.backend.close()
    bare.backend.close()
    return {key: float(f"{value:.4g}") if isinstance(value, float) else value for key, value in row.items()}


def stages(group: EPGroup, timer: Timer, config: EPConfig, num_tokens: int) -> None:
    """Prints when the thread blocks of one call pass each stage: us since the earliest start, over blocks and calls."""
    case = Case(group, config, num_tokens, profile=True)
    seen: dict[str, list[torch.Tensor]] = {"dispatch": [], "combine": []}
    for _ in range(12):
        for kernel, call in (("dispatch", case.dispatch), ("combine", case.combine)):
            timer.ready()
            call()
            seen[kernel].append(case.backend.kernels.stamps.cpu())
    for kernel, names in STAGES.items():
        times = torch.stack(seen[kernel][2:]).double()
        times = (times - times[:, :, 0].amin(1)[:, None, None]) / 1e3
        if group.rank == 0:
            print(f"{kernel} of {num_tokens} tokens, us since the first block's start: first / median / last block")
            for i, name in names.items():
                at = times[:, :, i]
                first, median, last = (float(t.median()) for t in (at.amin(1), at.median(1)[0], at.amax(1)))
                print(f"  {name:20} {first:7.2f} {median:7.2f} {last:7.2f}", flush=True)
    case.backend.close()


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench_ep", description=__doc__.splitlines()[0])
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--experts", type=int, default=288)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--tokens", type=int, nargs="*", default=TOKENS)
    parser.add_argument("--sms", type=int, nargs="*", default=[None])
    parser.add_argument("--exact", action="store_true", help="a row per expert crosses in combine, unsummed")
    parser.add_argument("--profile", action="store_true", help="print when each stage of a kernel is reached, too")
    arguments = parser.parse_args()
    group = EPGroup.from_mpi()
    torch.cuda.set_device(group.rank % torch.cuda.device_count())
    timer = Timer(group)
    gpu = torch.cuda.get_device_name()
    settings = {"ranks": group.size, "gpu": gpu, "hidden": arguments.hidden, "experts": arguments.experts,
                "top_k": arguments.top_k, "exact": arguments.exact, "mode": "low_latency"}  # fmt: skip
    report = Report(f"ep_low_latency_{group.size}gpu{'_exact' if arguments.exact else ''}", settings)
    for num_tokens in arguments.tokens:
        for sms in arguments.sms:
            config = EPConfig(
                arguments.hidden, arguments.experts // group.size * group.size, arguments.top_k, max(num_tokens, 128),
                payload="fp8", mode="low_latency", device="cuda", exact_combine=arguments.exact, num_sms=sms,
            )  # fmt: skip
            report.row(**low_latency_row(group, timer, config, num_tokens))
            if arguments.profile:
                stages(group, timer, config, num_tokens)
    timer.close()
    if group.rank == 0:
        print(report.finish())
    group.close()


if __name__ == "__main__":
    main()
