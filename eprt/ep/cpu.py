"""CpuBackend: dispatch and combine among CPU ranks, through shared memory inside a node and messages between nodes.

This file orders the calls and waits. The bytes are moved by csrc/cpu/ep_exchange.cpp and, between nodes, by links.py.
docs/protocol.md explains flags, epochs and buffers.

Inside one node results are bit-identical for any number of ranks and whatever else is in the batch.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eprt.ep.api import DispatchHandle, EPConfig, Received
from eprt.ep.checks import Checks
from eprt.ep.group import EPGroup
from eprt.ep.links import NodeLinks
from eprt.ep.order import COMBINE_RECV, COMBINE_SEND, DISPATCH_RECV, DISPATCH_SEND, VERBS, VerbOrder
from eprt.ep.stats import EPStats
from eprt.ep.topology import Topology
from eprt.ep.wait import SLICE_NS, Waiter
from eprt.ops import native

_SCALE_GROUP = 128
_FLAG_BYTES = 64


@dataclass(frozen=True)
class CpuDispatch:
    """DispatchHandle.state: the backend the handle belongs to."""

    backend: "CpuBackend"


class CpuBackend:
    """Construction and close() are collective. Calls must come from one thread at a time.

    Received tensors are buffers of the backend, valid until combine_recv of their handle. In low_latency mode x_RH has
    max_rows rows at a fixed address per buffer set, of which the first sum(recv_count_E) are filled.

    max_rows: the most rows one dispatch can bring, num_ranks * num_max_tokens_per_rank * top_k.
    """

    def __init__(self, config: EPConfig, group: EPGroup):
        self.config, self.group = config, group
        self.max_rows = group.size * config.num_max_tokens_per_rank * config.top_k
        self._static = config.mode == "low_latency"
        self._checks = Checks(config, group, self.max_rows if self._static else None)
        self._order = VerbOrder(config.num_buffers, self._checks.where)
        self._waiter = Waiter(group, config.timeout_s)
        self._topology = Topology(group.rank, group.node_of_rank)
        self._local_ranks = self._topology.ranks_of(self._topology.node)
        self._slots_per_rank = config.num_slots // group.size
        self._num_scales = -(-config.hidden_size // _SCALE_GROUP) if config.payload == "fp8" else 0
        self._ops = native.load()
        self._map_memory()
        self._make_buffers()
        self._closed = False
        group.barrier()

    # -- set-up --

    def _map_memory(self) -> None:
        """The shared window, the buffers between nodes, and the native side that knows their addresses."""
        ops, group, topology, spec = self._ops, self.group, self._topology, self._spec()
        num_blocks = [1 + len(topology.proxied_by(rank)) for rank in self._local_ranks]
        own = topology.local_index(group.rank)
        self._window = group.shared_window(ops.ep_segment_bytes(spec, len(num_blocks), num_blocks[own]))
        self._own_segment = self._window.segments[own]
        self._own_segment[: _FLAG_BYTES * (1 + num_blocks[own])] = 0  # the flags lead the segment

        node_sizes = [len(topology.ranks_of(node)) for node in range(topology.num_nodes)]
        self._links = NodeLinks(
            group,
            topology,
            self._waiter,
            self.config.num_buffers,
            block_bytes=[ops.ep_block_bytes(spec, size) for size in node_sizes],
            sums_bytes=[ops.ep_returned_bytes(spec, size) for size in node_sizes],
        )
        self._exchange = ops.ep_open(
            spec,
            group.rank,
            torch.tensor(topology.node_of_rank),
            torch.tensor([topology.home(source) for source in range(group.size)]),
            torch.tensor([segment.ctypes.data for segment in self._window.segments]),
            torch.tensor(num_blocks),
            self._links.block_addresses(),
            self._links.sums_addresses(),
        )
        self._links.connect(ops, self._exchange, self._own_segment)

    def _spec(self) -> Tensor:
        """The fields of struct Shape (csrc/cpu/ep_layout.h), in order."""
        config = self.config
        return torch.tensor(
            [
                self.group.size,
                self._slots_per_rank,
                config.hidden_size,
                config.top_k,
                config.num_max_tokens_per_rank,
                config.num_buffers,
                (torch.float32, torch.bfloat16).index(config.dtype),
                config.payload == "fp8",
            ]
        )

    def _make_buffers(self) -> None:
        sets = range(self.config.num_buffers)
        self._x = [self._new_rows(self.max_rows if self._static else 0) for _ in sets]
        self._recv_count = [torch.zeros(self._slots_per_rank, dtype=torch.int32) for _ in sets]
        self._num_rows = [0 for _ in sets]
        self._info = torch.zeros(2, dtype=torch.int64)  # rows received, largest number of rounds
        self._info_view = self._info.numpy()

    def _new_rows(self, num_rows: int) -> tuple[Tensor, Tensor]:
        """x_RH and scale_RG. Memory is taken only as rows are written."""
        dtype = torch.float8_e4m3fn if self._num_scales else self.config.dtype
        return torch.empty(num_rows, self.config.hidden_size, dtype=dtype), torch.empty(num_rows, self._num_scales)

    # -- the four verbs --

    def dispatch_send(
        self, x_TH: Tensor, slot_idx_TK: Tensor, topk_weights_TK: Tensor, num_rounds: int = 1
    ) -> DispatchHandle:
        self._check_open("dispatch_send")
        self._checks.tokens(x_TH, slot_idx_TK, topk_weights_TK, num_rounds)
        epoch = self._order.next_epoch()
        self._links.free_set(epoch)
        slot_idx_TK, topk_weights_TK = slot_idx_TK.contiguous(), topk_weights_TK.contiguous()
        bad = self._ops.ep_dispatch_send(
            self._exchange, epoch, x_TH.contiguous(), slot_idx_TK, topk_weights_TK, num_rounds
        )
        if bad >= 0:
            self._checks.fail_slot(slot_idx_TK, bad)
        self._links.send_blocks(epoch)
        self._order.done(DISPATCH_SEND, epoch)
        return DispatchHandle(x_TH.shape[0], epoch, topk_weights_TK, CpuDispatch(self))

    def dispatch_recv(self, handle: DispatchHandle) -> Received:
        epoch, i = self._enter(DISPATCH_RECV, handle)
        self._links.forward_blocks(epoch)
        self._wait_for_tokens(epoch, self._recv_count[i])
        self._num_rows[i], num_rounds = self._info_view.tolist()
        x_RH, scale_RG = self._rows(i)
        self._ops.ep_gather(self._exchange, epoch, x_RH, scale_RG)
        self._order.done(DISPATCH_RECV, epoch)
        return Received(x_RH, self._recv_count[i], scale_RG if self._num_scales else None, num_rounds)

    def combine_send(self, y_RH: Tensor, handle: DispatchHandle, signal: Any = None) -> None:
        epoch, i = self._enter(COMBINE_SEND, handle)
        if signal is not None:
            self._checks.fail("combine_send: the cpu backend takes no signal; pass y_RH once all of it is computed")
        self._checks.outputs(y_RH, self._num_rows[i])
        self._ops.ep_combine_send(self._exchange, epoch, y_RH.contiguous())
        self._order.done(COMBINE_SEND, epoch)

    def combine_recv(self, handle: DispatchHandle) -> Tensor:
        epoch, _ = self._enter(COMBINE_RECV, handle)
        self._wait_for_outputs(epoch)
        self._links.exchange_sums(epoch)
        y_TH = torch.empty(handle.num_tokens, self.config.hidden_size, dtype=self.config.dtype)
        self._ops.ep_sum_own(self._exchange, epoch, y_TH)
        self._order.done(COMBINE_RECV, epoch)
        return y_TH

    # -- beside the verbs --

    def combine_buffer(self, handle: DispatchHandle) -> Tensor:
        """Memory for this handle's y_RH from which combine_send need not copy; same rows as x_RH, config.dtype.

        To be asked for between dispatch_recv and combine_send and passed whole; not to be touched after that.
        """
        _, i = self._enter(COMBINE_SEND, handle)
        at = self._ops.ep_output_address(self._exchange, handle.epoch) - self._own_segment.ctypes.data
        rows, hidden, dtype = self._rows(i)[0].shape[0], self.config.hidden_size, self.config.dtype
        return (
            torch.from_numpy(self._own_segment[at : at + rows * hidden * dtype.itemsize]).view(dtype).view(rows, hidden)
        )

    def stats(self, reset: bool = False) -> EPStats:
        """What was counted since the last reset. From the thread that makes the calls."""
        self._check_open("stats")
        totals = torch.empty(4 * self.group.size + self._slots_per_rank + 2, dtype=torch.int64)
        self._ops.ep_stats(self._exchange, totals, reset)
        return EPStats.unpack(totals.numpy(), self.group.size)

    def close(self) -> None:
        """Frees all memory. Collective while all ranks live; never hangs when some do not."""
        if self._closed:
            return
        self._closed = True
        self._links.close()
        self._ops.ep_close(self._exchange)
        self._own_segment = np.empty(0, dtype=np.uint8)
        self._window.close()

    # -- inside --

    def _wait_for_tokens(self, epoch: int, recv_count: Tensor) -> None:
        ops, exchange, owns_core = self._ops, self._exchange, self._waiter.owns_core

        def seen_of(source: int) -> tuple[int, int]:
            holder, block = self._topology.home(source)
            flag = self._window.segments[holder].ctypes.data + _FLAG_BYTES * (1 + block)
            return source, ops.ep_flag_epoch(flag)

        self._waiter.for_call(
            lambda: ops.ep_dispatch_wait(exchange, epoch, recv_count, self._info, owns_core, SLICE_NS),
            seen_of,
            epoch,
            "dispatch",
        )

    def _wait_for_outputs(self, epoch: int) -> None:
        ops, exchange, owns_core = self._ops, self._exchange, self._waiter.owns_core
        self._waiter.for_call(
            lambda: ops.ep_combine_wait(exchange, epoch, owns_core, SLICE_NS),
            lambda local: (self._local_ranks[local], ops.ep_flag_epoch(self._window.segments[local].ctypes.data)),
            epoch,
            "combine",
        )

    def _rows(self, i: int) -> tuple[Tensor, Tensor]:
        """Set i's x_RH and scale_RG: with max_rows rows in low_latency mode, else exactly those received."""
        if self._static:
            return self._x[i]
        x, scale = self._x[i]
        num_rows = self._num_rows[i]
        if num_rows > x.shape[0]:
            # Geometric growth, so that a serving engine soon stops allocating.
            x, scale = self._x[i] = self._new_rows(min(max(num_rows, 2 * x.shape[0]), self.max_rows))
        return x[:num_rows], scale[:num_rows]

    def _enter(self, verb: int, handle: DispatchHandle) -> tuple[int, int]:
        """Checks that it is this handle's turn for this verb; returns its epoch and buffer set."""
        self._check_open(VERBS[verb])
        if not isinstance(handle.state, CpuDispatch) or handle.state.backend is not self:
            self._checks.fail(
                f"{VERBS[verb]}: this handle comes from another backend; each handle goes back to its own"
            )
        self._order.check(verb, handle.epoch)
        return handle.epoch, handle.epoch % self.config.num_buffers

    def _check_open(self, verb: str) -> None:
        if self._closed:
            raise RuntimeError(f"{self._checks.where} {verb}: this backend is closed")
