"""The low-latency tables of bench_ep, up to 256 tokens.

ep_low_latency_Ngpu: dispatch and combine, beside DeepEP V1 where it is importable.
ep_low_latency_parts_Ngpu: the four EP calls apart, the host's share, and what the statistics cost.
With --exact both names end in _exact: one row per expert crosses in combine, unsummed.
"""

import argparse
import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from benchmarks.ep.columns import LINK_GB_S, compared, identity_error, rounded
from benchmarks.ep.deep_ep_peer import LowLatencyPeer, deep_ep
from benchmarks.tools.gpu_timer import GpuTimer, difference
from benchmarks.tools.report import BenchmarkReport
from eprt import EPGroup
from eprt.ep.config import EPConfig
from eprt.ep.nvlink.low_latency_backend import NvlinkLowLatencyBackend
from eprt.ep.nvlink.options import NvlinkOptions
from eprt.ep.nvlink.structs import RECV, SEND

TOKENS = (1, 8, 32, 64, 128, 256)
SAMPLES = 50
# Numbers of the time stamps that a profiling kernel takes.
STAGES = {
    "dispatch": {
        0: "start",
        1: "routing read",
        2: "counts sent",
        3: "tokens stored",
        5: "receive begins",
        6: "counts here",
        7: "rows placed",
        8: "done",
    },
    "combine": {0: "start", 4: "sent", 8: "done"},
}


class LowLatencySetting(NamedTuple):
    """How the exchange is made."""

    config: EPConfig
    options: NvlinkOptions


class LowLatencyCase:
    """One batch of one rank, and the calls that are timed."""

    def __init__(
        self,
        group: EPGroup,
        setting: LowLatencySetting,
        num_tokens: int,
        profile: bool = False,
        stats: bool = True,
        backend_type: type[NvlinkLowLatencyBackend] = NvlinkLowLatencyBackend,
    ):
        config = setting.config
        self.backend = backend_type(config, group, setting.options, profile=profile, stats=stats)
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
        """(token, other rank) pairs: the largest number that leaves a rank or comes to one."""
        ranks = self.slots // (self.config.num_slots // group.size)
        to_rank = [int((ranks == r).any(1).sum()) for r in range(group.size)]
        to_rank[group.rank] = 0
        matrix = group.allgather(to_rank)
        return max(*(sum(row) for row in matrix), *(sum(column) for column in zip(*matrix)), 1)


def rows(
    report: BenchmarkReport,
    group: EPGroup,
    timer: GpuTimer,
    peers: dict[str, LowLatencyPeer],
    setting: LowLatencySetting,
    num_tokens: int,
) -> None:
    config, case = setting.config, LowLatencyCase(group, setting, num_tokens)
    max_tokens = config.num_max_tokens_per_rank
    sequences: dict[str, list[Callable[[], None]]] = {"eprt": [case.dispatch, case.combine]}
    sizes: dict[str, Any] = {"sms": case.backend.num_sms, "buffer_bytes": case.backend.kernels.shape.num_bytes}
    sizes["error_to_fp32"] = identity_error(group, case.backend, case.x, case.slots, case.weights)
    for name, peer in peers.items():
        peer.load_batch(case.x, case.slots, case.weights, max_tokens)
        sequences[name] = [peer.dispatch, peer.combine]
    if "deep_ep" in peers:
        sizes["deep_ep_buffer_bytes"] = peers["deep_ep"].buffer_bytes(max_tokens)
    times, kernels = timer.in_turns(sequences, SAMPLES), timer.kernels_in_turns(sequences)
    pairs, copies = num_tokens * config.top_k, case.remote_copies(group)
    payloads = ("dispatch fp8", case.backend.kernels.shape.payload_bytes), ("combine bf16", config.hidden_size * 2)
    for i, (call, size) in enumerate(payloads):
        columns = compared(
            {name: of_calls[i] for name, of_calls in times.items()},
            {name: of_calls[i] for name, of_calls in kernels.items()},
            pairs * size,
            copies * size / LINK_GB_S / 1e3,
        )
        report.add_row(**rounded({"tokens": num_tokens, "call": call, **columns, **sizes}))
    case.backend.close()


def parts_row(group: EPGroup, timer: GpuTimer, setting: LowLatencySetting, num_tokens: int) -> dict[str, Any]:
    """The four EP calls apart, the host's share, and what the statistics cost."""
    case, bare = LowLatencyCase(group, setting, num_tokens), LowLatencyCase(group, setting, num_tokens, stats=False)
    calls = [case.dispatch_send, case.dispatch_recv, case.combine_send, case.combine_recv]
    split = timer.in_turns({"calls": calls, "empty": [lambda: None]}, 20)
    kernels, out = case.backend.kernels, torch.empty_like(case.x)

    def pair() -> None:
        case.dispatch()
        case.combine()

    def launches() -> None:
        kernels.dispatch(0, num_tokens, case.x, case.slots, case.weights, SEND | RECV)
        kernels.combine_recv(0, num_tokens, case.slots, case.weights, out, case.y)

    host, launch = timer.host_us(pair) / 2, timer.host_us(launches) / 2
    chained = timer.chains(
        {"with": [case.dispatch, case.combine], "without": [bare.dispatch, bare.combine]}, repeats=20, samples=100
    )
    cost, low, high = difference(chained["with"], chained["without"])
    row = {"tokens": num_tokens}
    names = ("dispatch_send_us", "dispatch_recv_us", "combine_send_us", "combine_recv_us")
    row |= {name: timing.median_s * 1e6 for name, timing in zip(names, split["calls"])}
    row |= {
        "empty_us": split["empty"][0].median_s * 1e6,
        "launch_host_us": launch,
        "call_host_us": host,
        "warm_pair_us": sorted(chained["with"])[len(chained["with"]) // 2],
        "stats_cost_us": cost,
        "stats_cost_low_us": low,
        "stats_cost_high_us": high,
    }
    case.backend.close()
    bare.backend.close()
    return rounded(row)


def stages(group: EPGroup, timer: GpuTimer, setting: LowLatencySetting, num_tokens: int) -> None:
    """Prints when the thread blocks of one call pass each stage: us since the earliest start, over blocks and calls."""
    case = LowLatencyCase(group, setting, num_tokens, profile=True)
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


def reports(group: EPGroup, comm: Any, timer: GpuTimer, arguments: argparse.Namespace) -> list[BenchmarkReport]:
    experts = arguments.experts // group.size * group.size
    settings = {
        "ranks": group.size,
        "gpu": torch.cuda.get_device_name(),
        "hidden": arguments.hidden,
        "experts": experts,
        "top_k": arguments.top_k,
        "exact": arguments.exact,
    }
    suffix = f"{group.size}gpu{'_exact' if arguments.exact else ''}"
    beside, parts = (
        BenchmarkReport(f"ep_low_latency_{suffix}", settings),
        BenchmarkReport(f"ep_low_latency_parts_{suffix}", settings),
    )
    tokens = [t for t in arguments.tokens or TOKENS if t <= max(TOKENS)]
    if not tokens:
        return []
    modules = {"face": importlib.import_module("eprt.compat.deep_ep"), "deep_ep": deep_ep()}
    peers = {
        name: LowLatencyPeer(module, comm, max(*tokens, 128), arguments.hidden, experts)
        for name, module in modules.items()
        if module is not None
    }
    for num_tokens in tokens:
        config = EPConfig(
            arguments.hidden,
            experts,
            arguments.top_k,
            max(num_tokens, 128),
            payload="fp8",
            mode="low_latency",
            device="cuda",
            exact_combine=arguments.exact,
        )
        setting = LowLatencySetting(config, NvlinkOptions(num_sms=arguments.sms))
        rows(beside, group, timer, peers, setting, num_tokens)
        if not arguments.brief:
            parts.add_row(**parts_row(group, timer, setting, num_tokens))
        if arguments.profile:
            stages(group, timer, setting, num_tokens)
    for peer in peers.values():
        peer.close()
    return [beside] if arguments.brief else [beside, parts]
