"""The normal-mode tables of bench_ep, 512 tokens and more.

ep_normal_Ngpu: one row per token and rank, as DeepEP's normal mode, beside it where it is importable; each call by
itself on a cold L2. "again" repeats a known layout, which DeepEP's test_intranode.py times; "whole" counts, tells the
host how many rows come (the host waits for that), and sends. DeepEP's chunk sizes are the fastest of its test's sweep
here. GB_s: received rows, a rank's own included, as that test counts.
ep_normal_by_expert_Ngpu: see by_expert.py.
"""

import argparse
import importlib
import statistics
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.ep import by_expert
from benchmarks.ep.columns import LINK_GB_S, compared, rounded
from benchmarks.ep.deep_ep_peer import NormalPeer, deep_ep
from benchmarks.ep.normal_case import NormalCase
from benchmarks.tools.gpu_timer import GpuTimer
from benchmarks.tools.report import BenchmarkReport
from eprt import EPGroup
from eprt.compat.deep_ep.rows import RowExchange
from eprt.ep.nvlink.normal_grid import MAX_SMS, combine_work, dispatch_work

TOKENS = (512, 4096, 8192)
EXPERTS = 256
SAMPLES = 25
CALLS = ("dispatch fp8 again", "dispatch bf16 again", "dispatch fp8 whole", "dispatch bf16 whole", "combine bf16")
_HEAP_BYTES = 2 << 30


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
    grouped = BenchmarkReport(f"ep_normal_by_expert_{group.size}gpu", settings)
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
            by_expert.rows(grouped, timer, peers, case, payload, arguments.sms)
    for peer in peers.values():
        peer.close()
    exchange.close()
    return [beside, grouped]
