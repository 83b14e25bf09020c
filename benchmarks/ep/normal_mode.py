"""The normal-mode tables of bench_ep, 512 tokens and more.

ep_normal_Ngpu: one row per token and rank, as DeepEP's normal mode, beside it where it is importable; each call by
itself on a cold L2. "again" repeats a known layout, which DeepEP's test_intranode.py times; "whole" counts, tells the
host how many rows come (the host waits for that), and sends. DeepEP's chunk sizes are the fastest of its test's sweep
here. GB_s: received rows, a rank's own included, as that test counts.
ep_normal_by_expert_Ngpu: the backend's dispatch and combine, rows by expert, static bound.
"""

import argparse
import importlib
import statistics
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.ep.columns import LINK_GB_S, compared, identity_error, rounded
from benchmarks.ep.deep_ep_peer import NormalPeer, deep_ep
from benchmarks.tools.gpu_timer import GpuTimer
from benchmarks.tools.report import BenchmarkReport
from eprt import EPGroup
from eprt.compat.deep_ep.rows import RowExchange
from eprt.ep.config import EPConfig
from eprt.ep.nvlink.normal_backend import NvlinkNormalBackend
from eprt.ep.nvlink.normal_grid import MAX_SMS, combine_work, dispatch_work
from eprt.ep.nvlink.options import NvlinkOptions
from eprt.ep.reference import quantize

TOKENS = (512, 4096, 8192)
EXPERTS = 256
SAMPLES = 25
CALLS = ("dispatch fp8 again", "dispatch bf16 again", "dispatch fp8 whole", "dispatch bf16 whole", "combine bf16")
_HEAP_BYTES = 2 << 30


class NormalCase:
    """One batch of one rank: bf16, the same in fp8, and its routing."""

    def __init__(self, group: EPGroup, hidden: int, experts: int, top_k: int, num_tokens: int):
        generator = torch.Generator("cuda").manual_seed(group.rank)
        self.group, self.experts, self.num_tokens = group, experts, num_tokens
        self.x = torch.randn(num_tokens, hidden, device="cuda", generator=generator).bfloat16()
        self.fp8, self.scale = quantize(self.x)
        scores = torch.rand(num_tokens, experts, device="cuda", generator=generator)
        self.slots = scores.topk(top_k).indices
        self.weights = torch.rand(num_tokens, top_k, device="cuda", generator=generator)
        ranks = self.slots // (experts // group.size)
        sent = group.allgather([int((ranks == r).any(1).sum()) for r in range(group.size)])
        leaving = [sum(row) - row[r] for r, row in enumerate(sent)]
        coming = [sum(row[r] for row in sent) - sent[r][r] for r in range(group.size)]
        self.crossing = max(*leaving, *coming, 1)  # rows over the busiest link, one way
        self.received = max(sum(row[r] for row in sent) for r in range(group.size))
        self.y = torch.randn(sum(row[group.rank] for row in sent), hidden, device="cuda").bfloat16()

    def row_bytes(self, call: str) -> int:
        return self.x.shape[1] + self.scale.shape[1] * 4 if "fp8" in call else self.x.shape[1] * 2


class RowCalls:
    """The timed calls of RowExchange, by the names in CALLS."""

    def __init__(self, exchange: RowExchange, case: NormalCase, sms: int | None):
        self._exchange, self._case, self._sms = exchange, case, sms
        self._handle = self._whole(case.fp8, case.scale).handle

    def calls(self) -> dict[str, Callable[[], object]]:
        case = self._case
        return {
            "dispatch fp8 again": lambda: self._again(case.fp8, case.scale),
            "dispatch bf16 again": lambda: self._again(case.x, None),
            "dispatch fp8 whole": lambda: self._whole(case.fp8, case.scale),
            "dispatch bf16 whole": lambda: self._whole(case.x, None),
            "combine bf16": lambda: self._exchange.combine(case.y, self._handle, num_sms=self._sms),
        }

    def _again(self, x: torch.Tensor, scale: torch.Tensor | None) -> object:
        return self._exchange.dispatch_again(x, self._handle, scale_TG=scale, num_sms=self._sms)

    def _whole(self, x: torch.Tensor, scale: torch.Tensor | None) -> Any:
        case = self._case
        return self._exchange.dispatch(
            x,
            scale_TG=scale,
            num_experts=case.experts,
            topk_idx_TK=case.slots,
            topk_weights_TK=case.weights,
            num_sms=self._sms,
        )


def quick_us(timer: GpuTimer) -> Callable[[Callable[[], object]], float]:
    """Few samples of one call, for choosing among settings; equal on all ranks."""

    def us(call: Callable[[], object]) -> float:
        (timing,) = timer.in_turns({"call": [call]}, 4)["call"]
        return statistics.median(timer.group.allgather(timing.median_s)) * 1e6

    return us


def rows(
    report: BenchmarkReport,
    timer: GpuTimer,
    exchange: RowExchange,
    peers: dict[str, NormalPeer],
    case: NormalCase,
    sms: int | None,
) -> None:
    calls = {"eprt": RowCalls(exchange, case, sms).calls()}
    sizes: dict[str, Any] = {"buffer_bytes": exchange.kernels.memory.num_bytes}
    for name, peer in peers.items():
        peer.load_batch(case.x, (case.fp8, case.scale), case.y, case.slots, case.weights, case.experts)
        if name == "deep_ep":
            peer.tune(quick_us(timer))
            sizes |= {"deep_ep_sms": peer.num_sms, "deep_ep_buffer_bytes": peer.num_bytes}
        calls[name] = dict(zip(CALLS, (peer.fp8_again, peer.bf16_again, peer.fp8_whole, peer.bf16_whole, peer.combine)))
    for call in CALLS:
        times = timer.in_turns({name: [of[call]] for name, of in calls.items()}, SAMPLES)
        size = case.row_bytes(call)
        columns = compared(
            {name: timing for name, (timing,) in times.items()},
            {},
            case.received * size,
            case.crossing * size / LINK_GB_S / 1e3,
        )
        work = combine_work if "combine" in call else dispatch_work
        used = sms or work(case.group.size, case.slots.shape[1], grouped=False).blocks()
        report.add_row(**rounded({"tokens": case.num_tokens, "call": call, **columns, "sms": used, **sizes}))


def rows_by_expert(report: BenchmarkReport, timer: GpuTimer, case: NormalCase, payload: str, sms: int | None) -> None:
    """Rows by expert, through the backend."""
    hidden, top_k, R = case.x.shape[1], case.slots.shape[1], case.group.size
    config = EPConfig(hidden, case.experts, top_k, case.num_tokens, payload=payload, mode="normal", device="cuda")
    bound = min(2 * case.num_tokens * top_k, case.num_tokens * top_k * R)
    backend = NvlinkNormalBackend(config, case.group, NvlinkOptions(num_sms=sms, max_recv_rows=bound))
    y = torch.randn(backend.max_rows, hidden, device="cuda").bfloat16()
    handles: list[Any] = []

    def dispatch() -> None:
        handles.append(backend.dispatch(case.x, case.slots, case.weights)[0])

    def combine() -> None:
        backend.combine(y, handles.pop())

    error = identity_error(case.group, backend, case.x, case.slots, case.weights)
    timings = timer.in_turns({"eprt": [dispatch, combine]}, SAMPLES)["eprt"]
    pairs = case.num_tokens * top_k
    for call, timing in zip((f"dispatch {'fp8' if payload == 'fp8' else 'bf16'}", "combine bf16"), timings):
        size, floor = case.row_bytes(call), case.crossing * case.row_bytes(call) / LINK_GB_S / 1e3
        columns = compared({"eprt": timing}, {}, pairs * size, floor)
        work = combine_work if "combine" in call else dispatch_work
        sizes = {"sms": sms or work(R, top_k, grouped=True).blocks(), "buffer_bytes": backend.kernels.memory.num_bytes}
        report.add_row(**rounded({"tokens": case.num_tokens, "call": call, **columns, **sizes, "error_to_fp32": error}))
    backend.close()


def reports(
    group: EPGroup, comm: Any, timer: GpuTimer, arguments: argparse.Namespace, tokens: list[int]
) -> list[BenchmarkReport]:
    settings = {
        "ranks": group.size,
        "gpu": torch.cuda.get_device_name(),
        "hidden": arguments.hidden,
        "experts": EXPERTS,
        "top_k": arguments.top_k,
    }
    beside = BenchmarkReport(f"ep_normal_{group.size}gpu", settings)
    by_expert = BenchmarkReport(f"ep_normal_by_expert_{group.size}gpu", settings)
    exchange = RowExchange(group, _HEAP_BYTES, timeout_s=10.0)
    modules = {"deep_ep": deep_ep()}
    if not arguments.brief:
        modules["face"] = importlib.import_module("eprt.compat.deep_ep")
    peers = {
        name: NormalPeer(module, comm, _HEAP_BYTES, arguments.sms or MAX_SMS)
        for name, module in modules.items()
        if module is not None
    }
    for num_tokens in tokens:
        case = NormalCase(group, arguments.hidden, EXPERTS, arguments.top_k, num_tokens)
        rows(beside, timer, exchange, peers, case, arguments.sms)
        for payload in ("fp8", "same"):
            rows_by_expert(by_expert, timer, case, payload, arguments.sms)
    for peer in peers.values():
        peer.close()
    exchange.close()
    return [beside, by_expert]
