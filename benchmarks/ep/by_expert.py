"""The table ep_normal_by_expert_Ngpu: what a server needs of a dispatch, rows by expert, and the way back.

eprt's backend (static bound) writes received rows into their experts' groups and sums what the experts return. DeepEP
delivers each row once and leaves the rest to its caller: X_permute is a whole dispatch or combine of X and the Triton
kernel of permute.py, as many SMs as it wants; X alone is the exchange without it. X: deep_ep where it is installed,
face (eprt through DeepEP's interface). An fp8 payload is quantised inside eprt's dispatch; the others get it quantised.
All of them are checked: the same groups, and sums that differ by roundings (sum_difference, of the norm). after: the
payload of the dispatch that a combine belongs to.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from benchmarks.ep.columns import LINK_GB_S, compared, identity_error, rounded
from benchmarks.ep.deep_ep_peer import NormalPeer
from benchmarks.ep.normal_case import NormalCase
from benchmarks.tools.gpu_timer import GpuTimer
from benchmarks.tools.report import BenchmarkReport
from eprt.ep.config import EPConfig
from eprt.ep.nvlink.normal_backend import NvlinkNormalBackend
from eprt.ep.nvlink.normal_grid import combine_work, dispatch_work
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


def peer_sequences(peers: Mapping[str, NormalPeer], case: NormalCase, fp8: bool) -> dict[str, list[Callable]]:
    """[dispatch, combine] of each peer, without and with the permutation."""
    x, sequences = (case.fp8, case.scale) if fp8 else case.x, {}
    for name, peer in peers.items():
        y_GH = torch.randn_like(peer.grouped_dispatch(x).x_GH, dtype=torch.bfloat16)
        sequences[name] = [peer.fp8_whole if fp8 else peer.bf16_whole, peer.combine]
        sequences[f"{name}_permute"] = [
            lambda peer=peer: peer.grouped_dispatch(x),
            lambda peer=peer, y_GH=y_GH: peer.grouped_combine(y_GH),
        ]
    return sequences


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
    sequences = {"eprt": [own.dispatch, own.combine], **peer_sequences(peers, case, fp8)}
    times = timer.in_turns(sequences, SAMPLES)
    pairs, top_k = case.slots.numel(), case.slots.shape[1]
    for i, call in enumerate((f"dispatch {'fp8' if fp8 else 'bf16'}", "combine bf16")):
        size = case.row_bytes(call)
        columns = compared(
            {name: of_calls[i] for name, of_calls in times.items()},
            {},
            pairs * size,
            case.crossing * size / LINK_GB_S / 1e3,
        )
        work = combine_work if "combine" in call else dispatch_work
        sizes = {"sms": sms or work(case.group.size, top_k, grouped=True).blocks()}
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
    grouped = peer.grouped_dispatch(quantize(x_TH) if fp8 else x_TH)
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
    peer_TH = peer.grouped_combine((peer_GH * factor_G1).bfloat16()).float()
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


# -- the page --


def page_table(content: Mapping[str, Any]) -> str:
    """Of docs/figures-communication.md: us, and eprt's over each peer's."""
    lines = ["| tokens | call | eprt | DeepEP alone, ratio | with the permutation, ratio |", "|---|---|---|---|---|"]
    for row in content["rows"]:
        peers = (f"{row[f'{name}_us']:.0f}, {row[f'to_{name}']:.2f}" for name in ("deep_ep", "deep_ep_permute"))
        what = row["call"] if "dispatch" in row["call"] else f"{row['call']}, after {row['after']}"
        lines.append(f"| {row['tokens']} | {what} | {row['eprt_us']:.0f} | {' | '.join(peers)} |")
    return "\n".join(lines)
