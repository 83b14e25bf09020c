"""NvlinkNormalBackend: the four verbs for prefill. Any number of tokens; compact rows, by (slot, source, token, k).

The verbs, their order and their errors are NvlinkBackend's; this file decides where rows lie in the symmetric heap and
when the host learns how many there are. The kernels (normal.py) move the bytes.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from eprt.ep.api import DispatchHandle, EPConfig, Received
from eprt.ep.group.group import EPGroup
from eprt.ep.nvlink.backend import NvlinkBackend, Signal
from eprt.ep.nvlink.low_latency import SEND
from eprt.ep.nvlink.normal import MAX_RANKS, MAX_SCALES, MAX_SLOTS, MAX_TOP_K, Counts, Normal, Payload, Routing
from eprt.ep.nvlink.normal_grid import MAX_SMS
from eprt.ep.nvlink.normal_layout import BlockShape, Chunks, HeapShape, LayoutBuffers, LayoutShape, align
from eprt.ep.order import DISPATCH_RECV
from eprt.gpu.device import multiprocessors
from eprt.gpu.symmetric import HostWords


@dataclass(frozen=True)
class Flight:
    """Memory of one handle in flight, used again every num_buffers dispatches. block, returned: offsets in the heap."""

    buffers: LayoutBuffers
    slot_rows: Tensor
    host: HostWords
    block: int
    returned: int
    x_RH: Tensor
    scale_RG: Tensor | None


class NvlinkNormalBackend(NvlinkBackend):
    """Construction and close() are collective. As NvlinkBackend, but:

    Without max_recv_rows dispatch_recv waits for the counts, and x_RH has exactly the rows received (alignment
    included); the GPU sends meanwhile. With it nothing waits for the host, and all verbs may be captured in a graph.
    Memory is taken for the worst case, num_ranks * num_max_tokens_per_rank * top_k rows, or for max_recv_rows.
    """

    _learns_rounds = True
    takes_signals = False

    def __init__(self, config: EPConfig, group: EPGroup, *, stats: bool = True):
        self._tickets: dict[int, int] = {}
        self._counts: dict[int, Counts] = {}
        self._routings: dict[int, Routing] = {}
        super().__init__(config, group, stats=stats)
        self._learns_rounds = config.max_recv_rows is None

    def _most_rows(self) -> int:
        config = self.config
        slots_per_rank = config.num_slots // self.group.size
        return config.max_recv_rows or super()._most_rows() + slots_per_rank * (config.expert_alignment - 1)

    def _limits(self) -> tuple[tuple[str, int, int, str], ...]:
        config, sms = self.config, multiprocessors()
        scales = -(-config.hidden_size // 128)
        return (
            ("ranks in normal mode", self.group.size, MAX_RANKS, "use fewer ranks"),
            ("top_k", config.top_k, MAX_TOP_K, "use fewer experts per token"),
            ("num_slots", config.num_slots, MAX_SLOTS, "use fewer"),
            ("scales per token", scales, MAX_SCALES, "use a smaller hidden size"),
            ("rows", self.max_rows, 2**31 - 1, "bound them with max_recv_rows"),
            ("num_sms", config.num_sms or 1, sms, "this GPU has no more"),
        )

    def _allocate(self, profile: bool, stats: bool) -> None:
        config, size = self.config, self.group.size
        fp8, hidden, T = config.payload == "fp8", config.hidden_size, config.num_max_tokens_per_rank
        row_bytes, num_scales = (hidden, -(-hidden // 128)) if fp8 else (hidden * 2, 0)
        self._block_shape = BlockShape(self.max_rows, config.top_k, row_bytes, num_scales, grouped=True)
        back = T * (config.top_k if config.exact_combine else min(config.top_k, size))
        block_bytes, back_bytes = align(self._block_shape.num_bytes), align(back * hidden * 2)
        heap = HeapShape(size, config.num_slots, size * T, config.num_buffers)
        self.kernels = Normal(
            self.group, heap, config.num_buffers * (block_bytes + back_bytes), grouped=True, exact=config.exact_combine,
            num_sms=config.num_sms, timeout_s=config.timeout_s, stats=stats,
        )  # fmt: skip
        self.num_sms = config.num_sms or MAX_SMS
        begins = [self.kernels.data_begin + i * (block_bytes + back_bytes) for i in range(config.num_buffers)]
        self._flights = [self._new_flight(begin, begin + block_bytes) for begin in begins]

    def _new_flight(self, block: int, returned: int) -> Flight:
        config, shape, view = self.config, self._block_shape, self.kernels.memory.view
        fp8, fields, rows = config.payload == "fp8", self._block_shape.offsets(), self.max_rows
        buffers = LayoutShape(
            config.num_max_tokens_per_rank, config.top_k, config.num_slots, self.group.size,
            Chunks.most(config.num_max_tokens_per_rank, self.num_sms),
        ).new()  # fmt: skip
        x_RH = view(block + fields["x"], (rows, config.hidden_size), torch.float8_e4m3fn if fp8 else torch.bfloat16)
        scale_RG = None
        if fp8:
            scale_RG = view(block + fields["scale"], (rows, shape.scale_words), torch.float32)[:, : shape.num_scales]
        host = self.kernels.host_words(self._slots_per_rank)
        return Flight(buffers, buffers.field("slot_rows"), host, block, returned, x_RH, scale_RG)

    # -- the four verbs --

    def combine(self, y_RH: Tensor, handle: DispatchHandle) -> Tensor:
        y_TH = super().combine(y_RH, handle)
        self._forget(handle)
        return y_TH

    def close(self) -> None:
        closed = self._closed
        super().close()
        if not closed:
            for flight in self._flights:
                flight.host.close()
            self._flights = []

    # -- inside --

    def _sum(self, handle: DispatchHandle) -> Tensor:
        y_TH = super()._sum(handle)
        self._forget(handle)
        return y_TH

    def _launch_dispatch(self, handle: DispatchHandle, phases: int) -> None:
        i, state = handle.epoch % self.config.num_buffers, handle.state
        flight = self._flights[i]
        if phases & SEND:
            T = handle.num_tokens
            routing = Routing(
                T, self.config.num_slots, Chunks.of(T, self.num_sms), state.slot_idx_TK, handle.topk_weights_TK
            )
            self._routings[i] = routing
            self._tickets[i] = self.kernels.count(
                routing, flight.buffers, flight.host, alignment=self.config.expert_alignment,
                num_rounds=state.num_rounds, room=self._block_shape.capacity,
            )  # fmt: skip
        payload = Payload(state.x_TH, cast=self.config.payload == "fp8")
        self.kernels.prepare_dispatch(self._routings[i], payload, flight.buffers, self.config.top_k, phases)
        self.kernels.launch_dispatch(flight.block, self._block_shape.capacity)

    def _received(self, handle: DispatchHandle) -> Received:
        i = handle.epoch % self.config.num_buffers
        flight = self._flights[i]
        rows, rounds, slot_rows = self.max_rows, 1, None
        if self.config.max_recv_rows is None:
            self._counts[i] = counts = self.kernels.wait_counts(flight.host, self._tickets[i], self._slots_per_rank)
            rows, rounds = counts.rows, counts.rounds
            slot_rows = counts.slot_rows if self.config.expert_alignment == 1 else None  # the host's are rounded up
        self._order.done(DISPATCH_RECV, handle.epoch)
        scale_RG = None if flight.scale_RG is None else flight.scale_RG[:rows]
        return Received(flight.x_RH[:rows], flight.slot_rows, scale_RG, rounds, slot_rows)

    def _launch_combine_send(self, i: int, y_RH: Tensor, signal: Signal | None) -> None:
        flight = self._flights[i]
        self.kernels.combine_send(
            y_RH, flight.buffers, flight.returned, block=flight.block, shape=self._block_shape
        )  # fmt: skip

    def _launch_combine_recv(self, i: int, handle: DispatchHandle, y_TH: Tensor, y_RH: Tensor | None = None) -> None:
        flight = self._flights[i]
        self.kernels.combine_recv(
            self._routings[i], y_TH, flight.buffers, flight.returned, y=y_RH,
            block=flight.block, shape=self._block_shape,
        )  # fmt: skip

    def _num_rows(self, handle: DispatchHandle) -> int:
        counts: Any = self._counts.get(handle.epoch % self.config.num_buffers)
        return self.max_rows if counts is None else counts.rows

    def _check_outputs(self, y_RH: Tensor, handle: DispatchHandle, signal: Signal | None) -> None:
        if signal is not None:
            self._checks.fail("combine_send: signal: only mode='low_latency' sends tile by tile")
        super()._check_outputs(y_RH, handle, None)

    def _forget(self, handle: DispatchHandle) -> None:
        i = handle.epoch % self.config.num_buffers
        self._counts.pop(i, None)
        del self._routings[i]
