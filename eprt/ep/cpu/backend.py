"""CpuBackend: dispatch and combine among CPU ranks, through shared memory inside a node and messages between nodes.

This file orders the calls and waits. The bytes are moved by csrc/cpu/ep_exchange.cpp and, between nodes, by links.py.
docs/protocol.md explains flags, epochs and buffers.

Inside one node results are bit-identical for any number of ranks and whatever else is in the batch.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from eprt.ep.api import DispatchHandle, Received
from eprt.ep.checked_backend import CheckedBackend
from eprt.ep.config import EPConfig
from eprt.ep.cpu.links import NodeLinks
from eprt.ep.cpu.topology import Topology
from eprt.ep.errors import CONFIGURED_DEADLINE
from eprt.ep.group.group import EPGroup
from eprt.ep.group.wait import Waiter
from eprt.ep.order import COMBINE_RECV, COMBINE_SEND, DISPATCH_RECV, DISPATCH_SEND
from eprt.ep.stats import EPStats
from eprt.ops import native

_SCALE_GROUP = 128
_FLAG_BYTES = 64


def window_bytes(config: EPConfig, num_ranks: int) -> int:
    """Of a rank's shared window, where all ranks are on one node; known before there is a group."""
    spec = _spec(config, num_ranks, config.num_slots // num_ranks)
    return native.load().ep_segment_bytes(spec, num_ranks, 1)


def _spec(config: EPConfig, num_ranks: int, slots_per_rank: int) -> Tensor:
    """The fields of struct Shape (csrc/cpu/ep_layout.h), in order."""
    return torch.tensor(
        [
            num_ranks,
            slots_per_rank,
            config.hidden_size,
            config.top_k,
            config.num_max_tokens_per_rank,
            config.num_buffers,
            (torch.float32, torch.bfloat16).index(config.dtype),
            config.payload == "fp8",
        ]
    )


class CpuBackend(CheckedBackend):
    """Construction and close() are collective. Calls must come from one thread at a time.

    Received tensors are buffers of the backend, valid until combine_recv of their handle. In low_latency mode x_RH has
    max_rows rows at a fixed address per buffer set, of which the first sum(recv_count_E) are filled.
    """

    def __init__(self, config: EPConfig, group: EPGroup):
        self._static = config.mode == "low_latency"
        self.max_rows = group.size * config.num_max_tokens_per_rank * config.top_k  # that one dispatch can bring
        super().__init__(config, group, max_rows=self.max_rows if self._static else None)
        self._waiter = Waiter(group, config.timeout_s)
        self._topology = Topology(group.rank, group.node_of_rank)
        self._local_ranks = self._topology.ranks_of(self._topology.node)
        self._num_scales = -(-config.hidden_size // _SCALE_GROUP) if config.payload == "fp8" else 0
        self._ops = ops = native.load()
        self._dispatch_send, self._dispatch_recv = ops.ep_dispatch_send.default, ops.ep_dispatch_recv.default
        self._combine_send, self._combine_recv = ops.ep_combine_send.default, ops.ep_combine_recv.default
        self._count_alone = ops.ep_count_alone.default
        self._map_memory()
        if not group.view.is_full:
            self.restart(1)
        self._make_buffers()
        group.barrier()

    # -- set-up --

    def _map_memory(self) -> None:
        """The shared window, the buffers between nodes, and the native side that knows their addresses."""
        ops, group, topology, spec = (
            self._ops,
            self.group,
            self._topology,
            _spec(self.config, self.group.size, self._slots_per_rank),
        )
        num_blocks = [1 + len(topology.proxied_by(rank)) for rank in self._local_ranks]
        own = topology.local_index(group.rank)
        self._window = group.shared_window(ops.ep_segment_bytes(spec, len(num_blocks), num_blocks[own]))
        self._own_segment = self._window.segments[own]
        self._own_segment[: _FLAG_BYTES * (1 + num_blocks[own])] = 0  # the flags lead the segment

        node_sizes = [len(topology.ranks_of(node)) for node in range(topology.num_nodes)]
        block_bytes = [ops.ep_block_bytes(spec, size) for size in node_sizes]
        sums_bytes = [ops.ep_returned_bytes(spec, size) for size in node_sizes]
        sets = self.config.num_buffers
        self._links = NodeLinks(group, topology, self._waiter, sets, block_bytes=block_bytes, sums_bytes=sums_bytes)
        self._exchange = ops.ep_open(
            spec,
            group.rank,
            torch.tensor(topology.node_of_rank),
            torch.tensor([topology.home(source) for source in range(group.size)]),
            torch.tensor([segment.ctypes.data for segment in self._window.segments]),
            torch.tensor(num_blocks),
            *self._links.addresses(),
        )
        self._links.connect(ops, self._exchange, self._own_segment)

    def _make_buffers(self) -> None:
        sets = range(self.config.num_buffers)
        self._x = [self._new_rows(self.max_rows if self._static else 0) for _ in sets]
        self._recv_count = [torch.zeros(self._slots_per_rank, dtype=torch.int32) for _ in sets]
        self._y: list[Any] = [None for _ in sets]
        self._num_rows = [0 for _ in sets]
        self._info = torch.zeros(2, dtype=torch.int64)  # rows received, largest number of rounds
        self._info_view = self._info.numpy()

    def _new_rows(self, num_rows: int) -> tuple[Tensor, Tensor]:
        """x_RH and scale_RG. Memory is taken only as rows are written."""
        dtype = torch.float8_e4m3fn if self._num_scales else self.config.dtype
        return torch.empty(num_rows, self.config.hidden_size, dtype=dtype), torch.empty(num_rows, self._num_scales)

    # -- the four calls --

    def dispatch_send(
        self, x_TH: Tensor, slot_idx_TK: Tensor, topk_weights_TK: Tensor, num_rounds: int = 1
    ) -> DispatchHandle:
        self._check_open("dispatch_send")
        self._checks.tokens(x_TH, slot_idx_TK, topk_weights_TK, num_rounds)
        epoch = self._order.next_epoch()
        self._links.free_set(epoch)
        slot_idx_TK, topk_weights_TK = slot_idx_TK.contiguous(), topk_weights_TK.contiguous()
        bad = self._dispatch_send(self._exchange, epoch, x_TH.contiguous(), slot_idx_TK, topk_weights_TK, num_rounds)
        if bad >= 0:
            self._checks.fail_slot(slot_idx_TK, bad, self.group.view)
        self._links.send_blocks(epoch)
        self._order.complete(DISPATCH_SEND, epoch)
        return DispatchHandle(x_TH.shape[0], epoch, topk_weights_TK, self)

    def dispatch_recv(self, handle: DispatchHandle) -> Received:
        i, epoch = self._enter(DISPATCH_RECV, handle), handle.epoch
        self._links.forward_blocks(epoch)
        x, scale = self._x[i]
        timing = (self._waiter.owns_core, self._waiter.slice_ns)
        arguments = (self._exchange, epoch, x, scale, self._recv_count[i], self._info, *timing)
        self._waiter.for_call(self._dispatch_recv, arguments, self._seen_block, epoch, "dispatch")
        num_rows, num_rounds = self._info_view.tolist()
        if num_rows > x.shape[0]:
            # Geometric growth, so that a serving engine soon stops allocating.
            x, scale = self._x[i] = self._new_rows(min(max(num_rows, 2 * x.shape[0]), self.max_rows))
            self._ops.ep_gather(self._exchange, epoch, x, scale)
        self._num_rows[i] = num_rows
        self._order.complete(DISPATCH_RECV, epoch)
        if not self._static:
            x, scale = x[:num_rows], scale[:num_rows]
        return Received(x, self._recv_count[i], scale if self._num_scales else None, num_rounds)

    def combine_buffer(self, handle: DispatchHandle, received: Received) -> Tensor:
        return self.output_buffer(handle)

    def output_buffer(self, handle: DispatchHandle) -> Tensor:
        """[R, H] of config.dtype: a view of the shared window."""
        i = self._enter(COMBINE_SEND, handle)
        y_RH = self._output_rows(handle.epoch)
        return y_RH if self._static else y_RH[: self._num_rows[i]]

    def combine_send(self, y_RH: Tensor, handle: DispatchHandle, signal: Any = None) -> None:
        i = self._enter(COMBINE_SEND, handle)
        self._checks.no_signal(signal, "the cpu backend takes no signal; pass y_RH once all of it is computed")
        self._checks.outputs(y_RH, self._num_rows[i])
        self._combine_send(self._exchange, handle.epoch, y_RH.contiguous())
        self._order.complete(COMBINE_SEND, handle.epoch)

    def combine_recv(self, handle: DispatchHandle) -> Tensor:
        self._enter(COMBINE_RECV, handle)
        epoch = handle.epoch
        y_TH = torch.empty(handle.num_tokens, self.config.hidden_size, dtype=self.config.dtype)
        timing = (self._waiter.owns_core, self._waiter.slice_ns)
        if self._topology.num_nodes == 1:
            arguments = (self._exchange, epoch, y_TH, *timing)
            self._waiter.for_call(self._combine_recv, arguments, self._seen_outputs, epoch, "combine")
        else:
            arguments = (self._exchange, epoch, *timing)
            self._waiter.for_call(self._ops.ep_combine_wait, arguments, self._seen_outputs, epoch, "combine")
            self._links.exchange_sums(epoch)
            self._ops.ep_sum_own(self._exchange, epoch, y_TH)
        self._order.complete(COMBINE_RECV, epoch)
        return y_TH

    def is_alone(self) -> bool:
        return self.group.size == 1 and not self._num_scales

    def count_alone(self, num_tokens: int, compute_ns: int) -> None:
        self._count_alone(self._exchange, num_tokens, compute_ns)

    # -- beside the calls --

    def stats(self, reset: bool = False) -> EPStats:
        """What was counted since the last reset. From the thread that makes the calls."""
        self._check_open("stats")
        totals = torch.empty(4 * self.group.size + 3, dtype=torch.int64)
        self._ops.ep_stats(self._exchange, totals, reset)
        return EPStats.unpack(totals.numpy(), self.group.size)

    def set_counting(self, on: bool) -> None:
        """Whether stats() counts, as it does from the start. Off only to measure what it costs. One node only, and
        between calls; all ranks alike."""
        if self._topology.num_nodes > 1:
            self._checks.fail(
                f"set_counting({on}): of {self._topology.num_nodes} nodes; counting stays on between nodes"
            )
        self._ops.ep_set_counting(self._exchange, on)

    def delay_link(self, source: int, delay_s: float) -> None:
        """As Backend. Of ranks of other nodes the tokens are held back, not the outputs: those come in one message for
        a whole node."""
        if not 0 <= source < self.group.size or source == self.group.rank or not 0 <= delay_s <= self.config.timeout_s:
            self._checks.fail(
                f"delay_link({source}, {delay_s}): name another rank of 0..{self.group.size - 1} and a delay of 0 to "
                f"{self.config.timeout_s:g} s"
            )
        self._ops.ep_delay_link(self._exchange, source, round(delay_s * 1e9))

    def set_deadline(self, timeout_s: float, named: str = CONFIGURED_DEADLINE) -> None:
        self._waiter.timeout_s, self._waiter.deadline = timeout_s, named

    def require_restartable(self) -> None:
        if self._topology.num_nodes > 1:
            self._checks.fail(
                f"the ranks of {self._topology.num_nodes} nodes cannot go on without one of them; restart the job"
            )

    def restart(self, epoch: int) -> None:
        self.require_restartable()
        self._ops.ep_set_alive(self._exchange, torch.tensor(self.group.view.alive, dtype=torch.int64))
        self._order.restart(epoch - 1)

    def restart_without_lost(self) -> None:
        self.restart(self._order.next_safe_epoch)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._links.close()
        self._ops.ep_close(self._exchange)
        self._own_segment = np.empty(0, dtype=np.uint8)
        self._y.clear()
        self._window.close()

    # -- inside --

    def _seen_block(self, source: int) -> tuple[int, int]:
        """The rank and the epoch of its last block seen, for an error message."""
        holder, block = self._topology.home(source)
        flags = self._window.segments[holder].ctypes.data
        return source, self._ops.ep_flag_epoch(flags + _FLAG_BYTES * (1 + block))

    def _seen_outputs(self, local: int) -> tuple[int, int]:
        return self._local_ranks[local], self._ops.ep_flag_epoch(self._window.segments[local].ctypes.data)

    def _output_rows(self, epoch: int) -> Tensor:
        """All of the window's rows for y_RH, [max_rows, H]; one tensor per buffer set, made once."""
        i, hidden, dtype = epoch % self.config.num_buffers, self.config.hidden_size, self.config.dtype
        if self._y[i] is None:
            at = self._ops.ep_output_address(self._exchange, epoch) - self._own_segment.ctypes.data
            memory = self._own_segment[at : at + self.max_rows * hidden * dtype.itemsize]
            self._y[i] = torch.from_numpy(memory).view(dtype).view(self.max_rows, hidden)
        return self._y[i]
