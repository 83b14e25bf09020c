"""The table ep_normal_by_expert_Ngpu: what a server needs of a dispatch, rows by expert, and the way back.

eprt's backend (static bound) writes received rows into their experts' groups and sums what the experts return. DeepEP
delivers each row once and leaves the rest to its caller: X_permute is a whole dispatch or combine of X plus the Triton
kernel of permute.py, as many SMs as it wants; X alone is the exchange without it. Each part is timed by itself with the
host ahead, so the host's work between the parts costs X nothing here. X: deep_ep where it is installed, face (eprt
through DeepEP's interface). An fp8 payload is quantised inside eprt's dispatch; the others get it quantised.
All of them are checked: the same groups, and sums that differ by roundings (sum_difference, of the norm). after: the
payload of the dispatch that a combine belongs to. sms, X_sms: thread blocks of the exchange.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.ep.columns import LINK_GB_S, compared, identity_error, rounded
from benchmarks.ep.deep_ep_peer import NormalPeer
from benchmarks.ep.normal_case import NormalCase
from benchmarks.tools.gpu_timer import GpuTimer
from benchmarks.tools.report import BenchmarkReport
from benchmarks.tools.timing import Timing
from eprt.ep.config import EPConfig
from eprt.ep.nvlink.normal_backend import NvlinkNormalBackend
from eprt.ep.nvlink.normal_grid import ALONE_SMS
from eprt.ep.nvlink.options import NvlinkOptions
from eprt.ep.reference import dequantize, quantize

SAMPLES = 25
_DIGITS, _BASE = 6, 16  # e4m3 holds every integer up to 16
_MOST_DIFFERENCE = 0.02


class OwnCalls:
    """The backend's calls on one case."""

    def __init__(self, case: NormalCase, payload: str, sms: int | None):
        (T, hidden), top_k = case.x.shape, case.slots.shape[1]
        config = EPConfig(hidden, case.experts, top_k, T, payload=payload, mode="normal", device="cuda")
        bound = min(2 * T * top_k, T * top_k * case.group.size)
        self.backend = NvlinkNormalBackend(config, case.group, NvlinkOptions(num_sms=sms, max_recv_rows=bound))
        self._case, self._y = case, torch.randn(self.backend.max_rows, hidden, device="cuda").bfloat16()
        self._handles: list[Any] = []

    def dispatch(self) -> None:
        self._handles.append(self.backend.dispatch(self._case.x, self._case.slots, self._case.weights)[0])

    def combine(self) -> None:
        self.backend.combine(self._y, self._handles.pop())


def peer_calls(peers: Mapping[str, NormalPeer], case: NormalCase, fp8: bool) -> dict[str, list[Callable]]:
    """Each peer's dispatch and combine, and the permutation, which is the same for all."""
    calls: dict[str, list[Callable]] = {}
    for name, peer in peers.items():
        calls |= {f"{name} dispatch": [peer.fp8_whole if fp8 else peer.bf16_whole], f"{name} combine": [peer.combine]}
    if peers:
        one = next(iter(peers.values()))
        one.receive((case.fp8, case.scale) if fp8 else case.x)
        rows = one.group()
        y_GH = torch.randn_like(rows.x_GH, dtype=torch.bfloat16)
        calls["permute"] = [one.group, lambda: one.ungroup(y_GH, rows)]
    return calls


def with_permutation(times: Mapping[str, Sequence[Timing]], peers: Iterable[str], i: int) -> dict[str, Timing]:
    """Of dispatch (i = 0) or combine (1): eprt's time, and each peer's without and with the permutation."""
    columns = {"eprt": times["eprt"][i]}
    for name in peers:
        (alone,), permute = times[f"{name} {('dispatch', 'combine')[i]}"], times["permute"][i]
        columns |= {name: alone, f"{name}_permute": alone + permute}
    return columns


def rows(
    report: BenchmarkReport,
    timer: GpuTimer,
    peers: Mapping[str, NormalPeer],
    case: NormalCase,
    payload: str,
    sms: int | None,
) -> None:
    own, fp8 = OwnCalls(case, payload, sms), payload == "fp8"
    told = {"error_to_fp32": identity_error(case.group, own.backend, case.x, case.slots, case.weights)}
    for peer in peers.values():
        difference = max(case.group.allgather(sum_difference(own.backend, peer, case, fp8)))
        told["sum_difference"] = max(difference, told.get("sum_difference", 0.0))
    told |= {f"{name}_sms": peer.num_sms for name, peer in peers.items()}
    times = timer.in_turns({"eprt": [own.dispatch, own.combine], **peer_calls(peers, case, fp8)}, SAMPLES)
    pairs = case.slots.numel()
    for i, call in enumerate((f"dispatch {'fp8' if fp8 else 'bf16'}", "combine bf16")):
        size = case.row_bytes(call)
        floor_us = case.crossing * size / LINK_GB_S / 1e3
        columns = compared(with_permutation(times, peers, i), {}, pairs * size, floor_us)
        sizes = {"sms": sms or ALONE_SMS}
        sizes["buffer_bytes"] = own.backend.kernels.memory.num_bytes
        head = {"tokens": case.num_tokens, "call": call, "after": "fp8" if fp8 else "bf16"}
        report.add_row(**rounded({**head, **columns, **sizes, **told}))
    own.backend.close()


# -- the check --


def sum_difference(backend: NvlinkNormalBackend, peer: NormalPeer, case: NormalCase, fp8: bool) -> float:
    """||a - b|| / ||b|| of the sums by either way, around experts that multiply. AssertionError if groups differ."""
    x_TH = tagged(case.x, case.group.rank)
    handle, received = backend.dispatch(x_TH, case.slots, case.weights)
    counts = received.recv_count_E.tolist()
    rows = sum(counts)
    own_GH = plain(received.x_RH[:rows], None if received.scale_RG is None else received.scale_RG[:rows])
    peer.receive(quantize(x_TH) if fp8 else x_TH)
    grouped = peer.group()
    peer_GH = plain(grouped.x_GH, grouped.scale_GC)
    where = f"[rank {case.group.rank}/{case.group.size}] {case.num_tokens} tokens"
    assert grouped.count_E.tolist() == counts, f"{where}: groups of other sizes"
    expert_G = torch.repeat_interleave(torch.tensor(counts, device=x_TH.device))
    own_tag, peer_tag = ((expert_G << 32) + tag_of(x) for x in (own_GH, peer_GH))
    assert torch.equal(own_tag.sort().values, peer_tag.sort().values), f"{where}: other tokens in the groups"
    apart = float((own_GH[own_tag.argsort()] - peer_GH[peer_tag.argsort()]).norm() / peer_GH.norm())
    assert apart <= (_MOST_DIFFERENCE if fp8 else 0), f"{where}: rows differ by {apart}"
    factor_G1 = 1 + (expert_G % 8)[:, None] / 8
    y_RH = torch.zeros(backend.max_rows, x_TH.shape[1], dtype=torch.bfloat16, device=x_TH.device)
    y_RH[:rows] = own_GH * factor_G1
    own_TH = backend.combine(y_RH, handle).float()
    peer_TH = peer.send_back(peer.ungroup((peer_GH * factor_G1).bfloat16(), grouped)).float()
    difference = float((own_TH - peer_TH).norm() / peer_TH.norm())
    assert difference <= _MOST_DIFFERENCE, f"{where}: sums differ by {difference}"
    return difference


def tagged(x_TH: Tensor, rank: int) -> Tensor:
    """A copy whose first columns tell rank and token, in numbers that survive bf16 and, under a scale of 1, e4m3."""
    x_TH = x_TH.clone()
    token = torch.arange(len(x_TH), device=x_TH.device) + (rank << 18)
    x_TH[:, 0] = 448
    for digit in range(_DIGITS):
        x_TH[:, 1 + digit] = (token // _BASE**digit % _BASE).to(x_TH.dtype)
    return x_TH


def tag_of(x_GH: Tensor) -> Tensor:
    """int64 [G]"""
    return sum((x_GH[:, 1 + digit].round().long() * _BASE**digit for digit in range(_DIGITS)), torch.tensor(0))


def plain(x_GH: Tensor, scale_GC: Tensor | None) -> Tensor:
    return x_GH.float() if scale_GC is None else dequantize(x_GH, scale_GC)
