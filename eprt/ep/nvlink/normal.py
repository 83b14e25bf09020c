"""Normal: count, dispatch and combine kernels of the normal mode between the GPUs of one NVLink domain. Prefill: any
number of tokens, counts first, then bulk copies straight to the receiver's rows.

Shapes are arguments of a call, not of the kernels; whoever calls says where received and returned rows go (offsets in
the symmetric heap). Launches on the current stream. Knows nothing of EP calls, checks or errors (normal_backend.py,
compat/deep_ep/rows.py).
"""

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from eprt.ep.errors import EPError
from eprt.ep.group.group import EPGroup
from eprt.ep.nvlink.kernel_state import TICKETS_PER_CALL, KernelOptions, KernelState
from eprt.ep.nvlink.normal_grid import MAX_SMS, WARPS, Grid, combine_grid, dispatch_grid
from eprt.ep.nvlink.normal_layout import (
    MAX_CHUNK_TOKENS,
    BlockShape,
    Chunks,
    HeapLayout,
    LayoutBuffers,
    NormalHeap,
    combine_struct,
    context_struct,
    count_struct,
    dispatch_struct,
)
from eprt.ep.nvlink.structs import RECV, SEND
from eprt.gpu.device import multiprocessors, this_arch
from eprt.gpu.jit import KernelSource
from eprt.gpu.launch import Kernel, Launch, most_shared_bytes
from eprt.gpu.symmetric import HostWords

MAX_RANKS, MAX_TOP_K, MAX_SLOTS, MAX_SCALES = 30, 32, 32767, 256
_COUNT_THREADS = 512
_AWAKE_S = 0.02  # how long the host looks for counts without sleeping
_STATIC_SHARED_BYTES = 6 << 10  # of a thread block, at most, beside what is asked for at launch


@dataclass(frozen=True)
class Routing:
    """Where tokens go: topk_slot and topk_weight, or in_rank and slot_tokens. All contiguous."""

    num_tokens: int  # T
    num_slots: int  # S
    chunks: Chunks  # how the tokens are counted
    topk_slot: Tensor | None = None  # int32 or int64 [T, K]
    topk_weight: Tensor | None = None  # fp32 [T, K]
    in_rank: Tensor | None = None  # bool [T, R]
    slot_tokens: Tensor | None = None  # int32 [S]

    @property
    def top_k(self) -> int:
        return 0 if self.topk_slot is None else self.topk_slot.shape[1]


@dataclass(frozen=True)
class Payload:
    x: Tensor  # [T, H], contiguous
    scale: Tensor | None = None  # 4-byte words [T, G], any strides
    cast: bool = False  # bf16 to fp8 with scales

    @property
    def row_bytes(self) -> int:
        return self.x.shape[1] * (1 if self.cast else self.x.element_size())

    @property
    def num_scales(self) -> int:
        if self.cast:
            return -(-self.x.shape[1] // 128)
        return 0 if self.scale is None else self.scale.shape[1]


class Outputs(NamedTuple):
    """Of experts, for rows that lie by expert."""

    y: Tensor  # bf16 [rows, H]
    block: int  # offset of the received rows in the heap
    shape: BlockShape  # of that block


@dataclass(frozen=True)
class Counts:
    """What the host learns: items and rows received, most rounds of any rank, rows by slot; aligned ends included."""

    items: int
    rows: int
    rounds: int
    slot_rows: list[int]


class Normal(KernelState):
    """One rank's end. Construction and close() are collective. The heap's first data_begin bytes are the kernels' own.

    data_bytes: that follow in the heap, for the caller.
    grouped: received rows lie by expert, else one per (token, rank).
    num_sms: thread blocks of a launch; None: normal_grid.py decides.
    """

    def __init__(
        self,
        group: EPGroup,
        shape: NormalHeap,
        data_bytes: int,
        grouped: bool,
        num_sms: int | None,
        options: KernelOptions,
    ):
        tickets_per_call = TICKETS_PER_CALL, TICKETS_PER_CALL, 1  # by CallKind
        super().__init__(group, shape.num_bytes + data_bytes, tickets_per_call, options)
        self.shape, self.num_sms, self.data_begin = shape, num_sms, shape.num_bytes
        self._grouped, self._gpu_sms = grouped, multiprocessors()
        self._done, self._taken = (
            torch.zeros(size, dtype=torch.int32, device="cuda") for size in (1, 8 * shape.num_buffers)
        )
        self._host_tickets = 0
        self._load_kernels()
        context_type = context_struct(group.size)
        context = context_type(
            **self._context_fields(HeapLayout(**shape.offsets())),
            done=self._done.data_ptr(),
            taken=self._taken.data_ptr(),
            num_buffers=shape.num_buffers,
            width=shape.width,
            max_items=shape.max_items,
        )
        structs = (count_struct(context_type), dispatch_struct(context_type), combine_struct(context_type))
        self._count, self._dispatch, self._combine = (
            Launch(kernel, kind(context=context)) for kernel, kind in zip(self._kernels, structs)
        )
        self._meet()

    def _load_kernels(self) -> None:
        ranks, exact, stats = self.shape.num_ranks, self.options.exact, self.options.stats
        sources = kernel_sources(ranks, grouped=self._grouped, exact=exact, stats=stats, arch=this_arch())
        self._shared_bytes = most_shared_bytes(torch.cuda.current_device()) - _STATIC_SHARED_BYTES
        chunk_bytes = MAX_CHUNK_TOKENS * (4 + 2 * MAX_TOP_K)
        shared = (2 * (self.shape.max_slots + ranks) + 1) * 4 + chunk_bytes
        mover = (WARPS + 1) * 32, self._shared_bytes
        threads = ((_COUNT_THREADS, shared), mover, mover)
        names = ("eprt::normal::count", "eprt::normal::dispatch", "eprt::normal::combine")
        self._kernels = [Kernel(source, name, *sizes) for source, name, sizes in zip(sources, names, threads)]

    def _launches(self) -> Sequence[Launch]:
        return self._count, self._dispatch, self._combine

    def host_words(self, num_local_slots: int) -> HostWords:
        """Where a count tells the host."""
        return HostWords(4 + num_local_slots)

    # -- the three kernels --

    def count(
        self,
        routing: Routing,
        buffers: LayoutBuffers,
        host: HostWords,
        *,
        alignment: int = 1,
        num_rounds: int = 1,
        num_sms: int | None = None,
        room: int = 2**31 - 1,
    ) -> int:
        """Numbers the tokens, exchanges counts, places rows. Returns the ticket to wait_counts for.

        room: for so many rows here; more is a failure.
        """
        self._host_tickets = self._host_tickets % 0xFFFFFFFF + 1
        p = self._count.params
        p.layout = buffers.pointers
        p.topk_slot, p.in_rank = _pointer(routing.topk_slot), _pointer(routing.in_rank)
        p.slot_tokens, p.slot_begin = _pointer(routing.slot_tokens), buffers.slot_begin
        p.host, p.host_ticket = host.device_ptr, self._host_tickets
        p.num_tokens, p.top_k, p.num_slots = routing.num_tokens, routing.top_k, routing.num_slots
        p.slot_bytes = 0 if routing.topk_slot is None else routing.topk_slot.element_size()
        p.alignment, p.grouped, p.num_rounds, p.room = alignment, self._grouped, num_rounds, room
        p.chunk_tokens, p.num_chunks = routing.chunks.tokens, routing.chunks.count
        self._count(max(1, min(num_sms or self.num_sms or MAX_SMS, routing.chunks.count)), self._stream())
        return self._host_tickets

    def wait_counts(self, host: HostWords, ticket: int, num_local_slots: int) -> Counts:
        """The host waits for a count. The kernel has a deadline of its own; this one is for a GPU that is stuck."""
        words = host.words
        start = time.monotonic()
        while words[0] != ticket:
            waited = time.monotonic() - start
            if waited > 2 * self.timeout_s + 5:
                raise EPError(
                    f"[rank {self.group.rank}/{self.group.size}] dispatch (counts): the GPU has not come to them in "
                    f"{waited:.1f} s; what was launched before them on this stream?"
                )
            # The GPU stands still from the counts on until it is told where rows go: a sleep, 70 us with the kernel's
            # timer slack, only where it has long been busy with other things. sched_yield lets other threads run;
            # sleep(0) took 40 us.
            os.sched_yield() if waited < _AWAKE_S else time.sleep(2e-5)
        return Counts(words[1], words[2], words[3], words[4 : 4 + num_local_slots])

    def prepare_dispatch(
        self,
        routing: Routing,
        payload: Payload,
        buffers: LayoutBuffers,
        top_k: int,
        phases: int,
        *,
        again: bool = False,
        fill_tail: bool = False,
        num_sms: int | None = None,
    ) -> None:
        """All that launch_dispatch needs but what only the counts tell. top_k: entries that go with a row; again:
        another batch of the same layout."""
        p, x, scale = self._dispatch.params, payload.x, payload.scale
        p.layout = buffers.pointers
        p.x, p.scale = x.data_ptr(), _pointer(scale)
        p.scale_row_stride, p.scale_group_stride = (0, 0) if scale is None else scale.stride()
        p.topk_slot, p.topk_weight = _pointer(routing.topk_slot), _pointer(routing.topk_weight)
        p.slot_bytes = 0 if routing.topk_slot is None else routing.topk_slot.element_size()
        p.num_tokens, p.top_k, p.num_slots = routing.num_tokens, top_k, routing.num_slots
        p.chunk_tokens = routing.chunks.tokens
        p.x_bytes, p.row_bytes, p.num_scales = x.shape[1] * x.element_size(), payload.row_bytes, payload.num_scales
        p.cast, p.again, p.fill_tail, p.phases = payload.cast, again, fill_tail, phases
        self._dispatch_grid = dispatch_grid(
            self.group.size,
            top_k,
            grouped=self._grouped,
            phases=phases,
            x_bytes=p.x_bytes,
            cast_scales=payload.num_scales if payload.cast else 0,
            shared_bytes=self._shared_bytes,
            num_sms=num_sms or self.num_sms,
            gpu_sms=self._gpu_sms,
        )

    def launch_dispatch(self, block: int, capacity: int, tentative: bool = False) -> None:
        """Sends tokens as prepared, and receives others into the block at this offset, which holds so many rows.

        tentative: does nothing where more than that come (Counts.rows); then launch again. Of rows that are items.
        """
        p = self._dispatch.params
        p.block, p.capacity, p.tentative = block, capacity, tentative
        self._launch(self._dispatch, self._dispatch_grid)

    def combine_send(self, outputs: Outputs, buffers: LayoutBuffers, returned: int) -> None:
        """Outputs go back, summed with the weights in their block. returned: offset of the room for what comes back."""
        self._set_outputs(outputs)
        self._launch_combine(buffers, returned, SEND, outputs.shape.top_k)

    def combine_recv(
        self, routing: Routing, out: Tensor, buffers: LayoutBuffers, returned: int, outputs: Outputs | None = None
    ) -> None:
        """out bf16 [T, H]. With outputs: combine_send too, in the same launch."""
        if outputs is not None:
            self._set_outputs(outputs)
        self._set_routing(routing, out)
        self._launch_combine(buffers, returned, RECV if outputs is None else SEND | RECV, routing.top_k)

    def combine_items(
        self,
        y: Tensor,
        out: Tensor,
        buffers: LayoutBuffers,
        routing: Routing,
        returned: int,
        *,
        weights: Tensor | None,
        out_weights: Tensor | None,
        biases: tuple[Tensor, ...],
        num_sms: int | None,
    ) -> None:
        """Both phases for rows that are items: sums over ranks, unweighted; weights [items, K] go along."""
        p = self._combine.params
        p.y, p.y_weight, p.out_weight = y.data_ptr(), _pointer(weights), _pointer(out_weights)
        for i in range(2):
            p.bias[i] = biases[i].data_ptr() if i < len(biases) else None
        self._set_routing(routing, out)
        p.capacity, p.top_k = y.shape[0], 0 if weights is None else weights.shape[1]
        p.stride = returned_stride(y.shape[1], p.top_k)
        self._launch_combine(buffers, returned, SEND | RECV, routing.top_k, num_sms)

    def _launch_combine(
        self, buffers: LayoutBuffers, returned: int, phases: int, top_k: int, num_sms: int | None = None
    ) -> None:
        p = self._combine.params
        p.layout, p.block, p.phases = buffers.pointers, returned, phases
        grid = combine_grid(
            self.group.size,
            top_k,
            grouped=self._grouped,
            phases=phases,
            row_bytes=p.row_bytes,
            shared_bytes=self._shared_bytes,
            num_sms=num_sms or self.num_sms,
            gpu_sms=self._gpu_sms,
        )
        self._launch(self._combine, grid)

    def _launch(self, launch: Launch, grid: Grid) -> None:
        division = launch.params.division
        division.send_blocks, division.send_warps = grid.send_blocks, grid.send_warps
        division.recv_warps, launch.params.piece_bytes = grid.recv_warps, grid.piece_bytes
        launch(grid.blocks, self._stream())

    def _set_outputs(self, outputs: Outputs) -> None:
        p, (y, block, shape) = self._combine.params, outputs
        base, fields = self.memory.peer_ptr[self.group.rank] + block, shape.offsets()
        p.y, p.top_k, p.capacity = y.data_ptr(), shape.top_k, shape.capacity
        p.row_bytes = p.stride = y.shape[1] * 2
        p.item_row, p.item_weight, p.item_token = (base + fields[name] for name in ("entry", "weight", "token"))

    def _set_routing(self, routing: Routing, out: Tensor) -> None:
        p = self._combine.params
        p.topk_slot, p.topk_weight = _pointer(routing.topk_slot), _pointer(routing.topk_weight)
        p.slot_bytes = 0 if routing.topk_slot is None else routing.topk_slot.element_size()
        p.num_tokens, p.top_k, p.num_slots, p.out = out.shape[0], routing.top_k, routing.num_slots, out.data_ptr()
        p.row_bytes = p.stride = out.shape[1] * 2

    def readmit(self) -> None:
        self._taken.zero_()  # by epoch
        super().readmit()

    def restart(self, num_calls: int, alive: Sequence[bool]) -> None:
        self._taken.zero_()
        super().restart(num_calls, alive)

    def close(self) -> None:
        super().close()
        for kernel in self._kernels:
            kernel.close()


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def returned_stride(hidden: int, num_weights: int) -> int:
    """Bytes from one returned row to the next: values, then weights."""
    return hidden * 2 + -(-num_weights * 4 // 16) * 16


def kernel_sources(
    num_ranks: int, *, grouped: bool, exact: bool = False, stats: bool = True, arch: str = "sm_90a"
) -> tuple[KernelSource, ...]:
    """The count, dispatch and combine kernels; the same for all shapes. grouped: rows by expert, else one per item.
    exact: as EPConfig.exact_combine. stats: counters (KernelTotals)."""
    defines = (("NUM_RANKS", num_ranks), ("GROUPED", int(grouped)), ("EXACT", int(exact)), ("STATS", int(stats)))
    return tuple(KernelSource(name, arch, defines) for name in ("normal_count", "normal_dispatch", "normal_combine"))
