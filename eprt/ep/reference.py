"""The slow oracle: what dispatch and combine must give, in plain loops, and a backend made of it.

The functions take the inputs of all ranks at once, so one process can play any number of ranks and nodes.
Knows nothing of windows, flags or messages.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from eprt.ep.api import DispatchHandle, Received
from eprt.ep.checked_backend import CheckedBackend
from eprt.ep.config import EPConfig
from eprt.ep.group.group import EPGroup
from eprt.ep.order import COMBINE_RECV, COMBINE_SEND, DISPATCH_RECV, DISPATCH_SEND

SCALE_GROUP = 128
_MAX_E4M3 = 448.0
_TINY = 1e-30  # keeps a group of zeros from dividing by zero


@dataclass(frozen=True)
class SentTokens:
    """What one rank passes to dispatch_send."""

    x_TH: Tensor
    slot_idx_TK: Tensor
    topk_weights_TK: Tensor
    num_rounds: int = 1


def quantize(x_TH: Tensor) -> tuple[Tensor, Tensor]:
    """float8_e4m3fn [T, H] and fp32 scales [T, ceil(H/128)]: per 128 values, scale = max|x| / 448."""
    values, scales = [], []
    for group_TG in x_TH.float().split(SCALE_GROUP, dim=1):
        most_T = group_TG.abs().amax(1).clamp_min(_TINY)
        # With a number in place of a tensor torch takes a reciprocal and a product: two roundings.
        factor_T = torch.full_like(most_T, _MAX_E4M3) / most_T
        values.append((group_TG * factor_T[:, None]).to(torch.float8_e4m3fn))
        scales.append(most_T / torch.full_like(most_T, _MAX_E4M3))
    return torch.cat(values, 1), torch.stack(scales, 1)


def dequantize(x_RH: Tensor, scale_RG: Tensor) -> Tensor:
    """fp32 [R, H]."""
    return x_RH.float() * scale_RG.repeat_interleave(SCALE_GROUP, 1)[:, : x_RH.shape[1]]


def routes_to(rank: int, config: EPConfig, tokens: Sequence[SentTokens]) -> list[tuple[int, int, int, int]]:
    """(slot of this rank, source rank, token, k) of every row that `rank` receives, in the order of its rows."""
    slots_per_rank = config.num_slots // len(tokens)
    routes = []
    for slot in range(slots_per_rank):
        for source, sent in enumerate(tokens):
            for token, chosen in enumerate(sent.slot_idx_TK.tolist()):
                for k, its_slot in enumerate(chosen):
                    if its_slot == rank * slots_per_rank + slot:
                        routes.append((slot, source, token, k))
    return routes


def received(rank: int, config: EPConfig, tokens: Sequence[SentTokens]) -> Received:
    """What dispatch_recv of `rank` returns when rank r sent tokens[r]. Exact, bit for bit."""
    routes = routes_to(rank, config, tokens)
    x = torch.zeros(len(routes), config.hidden_size, dtype=config.dtype)
    count = torch.zeros(config.num_slots // len(tokens), dtype=torch.int32)
    for row, (slot, source, token, _) in enumerate(routes):
        x[row] = tokens[source].x_TH[token]
        count[slot] += 1
    x, scale = quantize(x) if config.payload == "fp8" else (x, None)
    return Received(x, count, scale, max(sent.num_rounds for sent in tokens))


def combined(
    rank: int, config: EPConfig, node_of_rank: Sequence[int], tokens: Sequence[SentTokens], outputs: Sequence[Tensor]
) -> Tensor:
    """What combine_recv of `rank` returns when rank r's experts gave outputs[r]. Exact, bit for bit.

    For each token and node the fp32 sum over k of weight * output, in order of k; those of other nodes are rounded to
    config.dtype for the way back; then the fp32 sum over nodes, in their order, rounded to config.dtype.
    """
    slots_per_rank = config.num_slots // len(tokens)
    row_of = [
        {route[1:]: row for row, route in enumerate(routes_to(holder, config, tokens))} for holder in range(len(tokens))
    ]
    mine = tokens[rank]
    y = torch.zeros(mine.x_TH.shape[0], config.hidden_size)
    for token, chosen in enumerate(mine.slot_idx_TK.tolist()):
        share: dict[int, Tensor] = {}
        for k, slot in enumerate(chosen):
            if slot == -1:
                continue
            holder = slot // slots_per_rank
            output = outputs[holder][row_of[holder][rank, token, k]].float()
            node = node_of_rank[holder]
            share[node] = share.get(node, torch.zeros_like(output)) + mine.topk_weights_TK[token, k] * output
        for node in sorted(share):
            wire = share[node] if node == node_of_rank[rank] else share[node].to(config.dtype).float()
            y[token] = y[token] + wire
    return y.to(config.dtype)


@dataclass
class _Flight:
    own: SentTokens
    everyone: Sequence[SentTokens] = ()
    own_output: Tensor | None = None


class ReferenceBackend(CheckedBackend):
    """The EP calls over the group's allgather: every rank learns everything and computes its share.

    For checking other backends; orders of magnitude slower. Works on any EPGroup, so also in one process.
    """

    def __init__(self, config: EPConfig, group: EPGroup):
        super().__init__(config, group)
        self._flights: dict[int, _Flight] = {}

    def dispatch_send(
        self, x_TH: Tensor, slot_idx_TK: Tensor, topk_weights_TK: Tensor, num_rounds: int = 1
    ) -> DispatchHandle:
        self._check_open("dispatch_send")
        self._checks.tokens(x_TH, slot_idx_TK, topk_weights_TK, num_rounds)
        for flat, slot in enumerate(slot_idx_TK.flatten().tolist()):
            if not -1 <= slot < self.config.num_slots:
                self._checks.fail_slot(slot_idx_TK, flat)
        epoch = self._order.next_epoch()
        own = SentTokens(x_TH.clone(), slot_idx_TK.clone(), topk_weights_TK.clone(), num_rounds)
        self._flights[epoch] = _Flight(own)
        self._order.complete(DISPATCH_SEND, epoch)
        return DispatchHandle(x_TH.shape[0], epoch, topk_weights_TK, self)

    def dispatch_recv(self, handle: DispatchHandle) -> Received:
        self._enter(DISPATCH_RECV, handle)
        flight = self._flights[handle.epoch]
        flight.everyone = self.group.allgather(flight.own)
        self._order.complete(DISPATCH_RECV, handle.epoch)
        return received(self.group.rank, self.config, flight.everyone)

    def combine_send(self, y_RH: Tensor, handle: DispatchHandle, signal: Any = None) -> None:
        self._enter(COMBINE_SEND, handle)
        flight = self._flights[handle.epoch]
        self._checks.no_signal(signal, "the reference backend takes no signal; pass y_RH once all of it is computed")
        self._checks.outputs(y_RH, len(routes_to(self.group.rank, self.config, flight.everyone)))
        flight.own_output = y_RH.clone()
        self._order.complete(COMBINE_SEND, handle.epoch)

    def combine_recv(self, handle: DispatchHandle) -> Tensor:
        self._enter(COMBINE_RECV, handle)
        flight = self._flights.pop(handle.epoch)
        outputs = self.group.allgather(flight.own_output)
        y_TH = combined(self.group.rank, self.config, self.group.node_of_rank, flight.everyone, outputs)
        self._order.complete(COMBINE_RECV, handle.epoch)
        return y_TH

    def close(self) -> None:
        self._closed = True
        self._flights.clear()
