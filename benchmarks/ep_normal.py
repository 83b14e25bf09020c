"""The normal-mode rows of bench_ep: per-token rows (what DeepEP's normal mode does) and the backend's rows by expert.

dispatch_us is the whole dispatch (counts and data, static bound: no host wait); again_us repeats a layout, which is
what DeepEP's test_intranode.py times. GB/s count received rows with those of the rank itself, as that test does; the
floor counts what must cross at 450 GB/s.
"""

from typing import Any

import torch

from eprt import EPGroup
from eprt.ep.api import EPConfig
from eprt.ep.nvlink_normal_backend import NvlinkNormalBackend
from eprt.ep.nvlink_rows import ReceivedRows, RowExchange
from eprt.ep.reference import quantize


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
        to_rank = [int((ranks == r).any(1).sum()) for r in range(group.size)]
        sent = group.allgather(to_rank)
        self.remote = max(sum(row) - row[r] for r, row in enumerate(sent))
        self.received = sum(row[group.rank] for row in sent)


class RowCalls:
    """The calls of RowExchange that are timed."""

    def __init__(self, exchange: RowExchange, case: NormalCase, fp8: bool, sms: int | None):
        self.exchange, self.case, self.sms = exchange, case, sms
        self.x, self.scale = (case.fp8, case.scale) if fp8 else (case.x, None)
        self.bound = case.num_tokens * case.group.size
        self.layout = self.dispatch(0)
        rows = self.layout.handle.num_rows
        self.y = torch.randn(rows, case.x.shape[1], device="cuda").bfloat16()

    def dispatch(self, bound: int) -> ReceivedRows:
        case = self.case
        return self.exchange.dispatch(
            self.x, scale_TG=self.scale, num_experts=case.experts, topk_idx_TK=case.slots,
            topk_weights_TK=case.weights, num_worst_rows=bound, num_sms=self.sms,
        )  # fmt: skip

    def whole(self) -> None:
        self.dispatch(self.bound)

    def again(self) -> None:
        self.exchange.dispatch_again(self.x, self.layout.handle, scale_TG=self.scale, num_sms=self.sms)

    def combine(self) -> None:
        self.exchange.combine(self.y, self.layout.handle, num_sms=self.sms)


def rows_row(timer: Any, exchange: RowExchange, case: NormalCase, fp8: bool, sms: int | None) -> dict[str, Any]:
    """Per-token rows."""
    calls = RowCalls(exchange, case, fp8, sms)
    whole, again, combine = timer.together(calls.whole, calls.again, calls.combine, samples=30)
    hidden = case.x.shape[1]
    row_bytes = hidden + case.scale.shape[1] * 4 if fp8 else hidden * 2
    floor, combine_floor = (case.remote * size / 450e3 for size in (row_bytes, hidden * 2))
    return _rounded({
        "layout": "per token", "payload": "fp8" if fp8 else "bf16", "tokens": case.num_tokens,
        "sms": sms or exchange.kernels.num_sms, "dispatch_us": whole, "again_us": again,
        "again_GB_s": case.received * row_bytes / again / 1e3, "combine_us": combine,
        "combine_GB_s": case.received * hidden * 2 / combine / 1e3, "again_to_floor": again / floor,
        "combine_to_floor": combine / combine_floor, "buffer_bytes": exchange.kernels.memory.num_bytes,
    })  # fmt: skip


def verbs_row(timer: Any, case: NormalCase, fp8: bool, sms: int | None) -> dict[str, Any]:
    """Rows by expert, through the backend."""
    hidden, top_k, R = case.x.shape[1], case.slots.shape[1], case.group.size
    rows = case.num_tokens * top_k * 2  # twice the balanced load
    config = EPConfig(
        hidden, case.experts, top_k, case.num_tokens, payload="fp8" if fp8 else "same", mode="normal", device="cuda",
        num_sms=sms, max_recv_rows=min(rows, case.num_tokens * top_k * R),
    )  # fmt: skip
    backend = NvlinkNormalBackend(config, case.group)
    y = torch.randn(backend.max_rows, hidden, device="cuda").bfloat16()
    handles: list[Any] = []

    def dispatch() -> None:
        handles.append(backend.dispatch(case.x, case.slots, case.weights)[0])

    def combine() -> None:
        backend.combine(y, handles.pop())

    dispatch_us, combine_us = timer.together(dispatch, combine, samples=30)
    row_bytes = hidden + -(-hidden // 128) * 4 if fp8 else hidden * 2
    floor, combine_floor = (case.remote * size / 450e3 for size in (row_bytes, hidden * 2))
    row = {
        "layout": "by expert", "payload": config.payload, "tokens": case.num_tokens, "sms": backend.num_sms,
        "dispatch_us": dispatch_us, "combine_us": combine_us, "dispatch_to_floor": dispatch_us / floor,
        "combine_to_floor": combine_us / combine_floor, "buffer_bytes": backend.kernels.memory.num_bytes,
    }  # fmt: skip
    backend.close()
    return _rounded(row)


def _rounded(row: dict[str, Any]) -> dict[str, Any]:
    return {key: float(f"{value:.4g}") if isinstance(value, float) else value for key, value in row.items()}
