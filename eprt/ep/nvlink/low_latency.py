"""LowLatency: dispatch and combine kernels between the GPUs of one NVLink domain. Decode: static shapes, no host waits.

A token crosses once to each rank that holds one of its slots and is expanded there; combine sums a rank's experts in
fp32 before the wire. Launches on the current stream. Knows nothing of EP calls, checks or errors
(low_latency_backend.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eprt.ep.group.group import EPGroup
from eprt.ep.nvlink.kernel_state import TICKETS_PER_CALL, KernelOptions, KernelState
from eprt.ep.nvlink.low_latency_layout import (
    HandleBuffers,
    HeapLayout,
    LowLatencyHeap,
    WireLayout,
    combine_struct,
    context_struct,
    dispatch_struct,
)
from eprt.ep.nvlink.structs import RECV, SEND
from eprt.gpu.device import multiprocessors, this_arch
from eprt.gpu.jit import KernelSource
from eprt.gpu.launch import Kernel, Launch

FLOAT, POWER_OF_TWO, EXPONENTS = 0, 1, 2  # ScaleFormat
MAX_RANKS, MAX_TOP_K, MAX_LOCAL_SLOTS, MAX_ENTRIES = 32, 32, 1024, 65536
MAX_SMS = 128  # thread blocks of a launch
COMBINES = ("sum", "exact", "late")  # a row per rank; per expert; per rank, with weights that only combine is told
PAYLOAD_DTYPES = {"fp8": torch.float8_e4m3fn, "bf16": torch.bfloat16}
_DISPATCH, _COMBINE = "eprt::low_latency::dispatch", "eprt::low_latency::combine"
_DISPATCH_THREADS, _COMBINE_THREADS = 640, 512  # kAllThreads, kThreads
_STAMPS = 16


@dataclass(frozen=True)
class Rows:
    """Where a dispatch puts what it receives."""

    x: Tensor  # [rows, H], fp8 or bf16; its dtype decides what crosses
    # In scale_format; None for bf16. Element (slot, row, group) lies at the sum of these times scale_strides; rows are
    # counted over all slots.
    scale: Tensor | None
    count: Tensor  # int32 [L], rows of each local slot
    scale_strides: tuple[int, int, int] = (0, 0, 0)
    scale_format: int = FLOAT
    slot_stride: int = 0  # rows between the first rows of two slots; 0: compact
    alignment: int = 1  # of a compact slot's first row
    token: Tensor | None = None  # int32 [rows], each row's index on its source rank
    range: Tensor | None = None  # int64 [L, R], first row within the slot << 32 | number of rows, for each source


@dataclass(frozen=True)
class Signal:
    """Single-batch overlap: combine_send sends each tile of rows as soon as its counter reaches the threshold."""

    # int32 or uint32 on the GPU, element slot * slot_tiles + tile; the kernel that computes the rows raises it, with
    # release.
    counter: Tensor
    threshold: int
    block_m: int  # rows of a tile
    slot_tiles: int  # tiles of a slot
    num_sms: int = 3  # thread blocks to send with


class LowLatency(KernelState):
    """One rank's end. Construction and close() are collective. Received rows go where bind() says.

    num_rows: rows that a dispatch can bring at most.
    num_handles: dispatches whose combine may still come, numbered from 0.
    num_sms: thread blocks of a launch; may differ between ranks. Default: of a launch that sends and receives, beside
        which nothing of this layer runs, almost all SMs; of one that does either, half as many.
    """

    def __init__(
        self,
        group: EPGroup,
        shape: LowLatencyHeap,
        num_rows: int,
        num_handles: int,
        num_sms: int | None,
        options: KernelOptions,
    ):
        super().__init__(group, shape.num_bytes, (TICKETS_PER_CALL,) * 2, options, by_nvlink=True)
        self.shape, sms = shape, multiprocessors()
        self.num_sms, self.half_sms = num_sms or min(MAX_SMS, sms), num_sms or min(MAX_SMS // 2, sms)
        self.stamps = torch.zeros(self.num_sms if options.profile else 0, _STAMPS, dtype=torch.int64, device="cuda")
        self._load_kernels()
        self.handles = [HandleBuffers.new(shape, num_rows) for _ in range(num_handles)]
        self._has_weights = [False] * num_handles  # whether dispatch was given weights
        context_type = context_struct(group.size, shape.node_ranks is not None)
        context = context_type(
            **self._context_fields(shape.layout(HeapLayout)),
            stamps=self.stamps.data_ptr(),
            max_tokens=shape.max_tokens,
            num_slots=shape.num_local_slots,
            num_buffers=shape.num_buffers,
            **({} if shape.node_ranks is None else {"wire": shape.layout(WireLayout)}),
        )
        dispatch_type, combine_type = dispatch_struct(context_type), combine_struct(context_type)
        self._dispatches, self._combines = [], []
        first, combine = (next(iter(kernels.values())) for kernels in (self._dispatch_kernels, self._combine_kernels))
        for buffers in self.handles:
            handle = buffers.pointers
            self._dispatches.append(Launch(first, dispatch_type(context=context, handle=handle)))
            self._combines.append(Launch(combine, combine_type(context=context, handle=handle)))
        self._meet()

    def _load_kernels(self) -> None:
        shape, options = self.shape, self.options
        sources = kernel_sources(shape, profile=options.profile, stats=options.stats, arch=this_arch())
        routing = shape.max_tokens * shape.top_k * 2 + 16
        counted = shape.num_ranks * shape.count_words
        shared = routing + (counted + 2 * shape.num_local_slots + 1) * 4
        self._dispatch_kernels = {
            payload: self._new_kernel(sources[payload], _DISPATCH, _DISPATCH_THREADS, shared)
            for payload in PAYLOAD_DTYPES
            if payload in sources
        }
        self._combine_kernels = {
            how: self._new_kernel(sources[how], _COMBINE, _COMBINE_THREADS) for how in COMBINES if how in sources
        }

    def _new_kernel(self, source: KernelSource, entry: str, num_threads: int, shared_bytes: int = 0) -> Kernel:
        return Kernel(source, entry, num_threads, shared_bytes)

    def _launches(self) -> Sequence[Launch]:
        return *self._dispatches, *self._combines

    def bind(self, i: int, rows: Rows) -> None:
        """Dispatches into handle i put what they receive there, from now on."""
        launch = self._dispatches[i]
        launch.use(self._dispatch_kernels["bf16" if rows.scale is None else "fp8"])
        p = launch.params
        p.recv_x, p.recv_count = rows.x.data_ptr(), rows.count.data_ptr()
        p.recv_scale = None if rows.scale is None else rows.scale.data_ptr()
        p.recv_token = None if rows.token is None else rows.token.data_ptr()
        p.recv_range = None if rows.range is None else rows.range.data_ptr()
        p.scale_slot_stride, p.scale_row_stride, p.scale_group_stride = rows.scale_strides
        p.scale_format, p.slot_stride, p.alignment = rows.scale_format, rows.slot_stride, rows.alignment

    def bind_again(self, i: int, x: Tensor, scale: Tensor | None, count: Tensor) -> None:
        """bind, with other tensors of the same shapes."""
        p = self._dispatches[i].params
        p.recv_x, p.recv_count = x.data_ptr(), count.data_ptr()
        if scale is not None:
            p.recv_scale = scale.data_ptr()

    def count_for_caller(self, i: int, recv_total: Tensor | None, wait_cost: Tensor | None) -> None:
        """Dispatches into handle i also add to the caller's own totals.

        recv_total: int32 [L], rows of each slot.
        wait_cost: int64 [R], ns waited for each rank.
        """
        p = self._dispatches[i].params
        p.recv_total = None if recv_total is None else recv_total.data_ptr()
        p.wait_cost = None if wait_cost is None else wait_cost.data_ptr()

    def dispatch(
        self, i: int, num_tokens: int, x: Tensor, topk_slot: Tensor, topk_weight: Tensor | None, phases: int
    ) -> None:
        """Into handle i.

        num_tokens: T, which the caller knows; to ask a tensor for it takes longer than all else here.
        x: bf16 [T, H], contiguous, as the others.
        topk_slot: int32 or int64 [T, K].
        topk_weight: fp32 [T, K]; may be None for a shape with `exact` or `late_weights`, whose combine is given them.
        phases: SEND, RECV or both.
        """
        self._has_weights[i] = topk_weight is not None
        launch = self._dispatches[i]
        p = launch.params
        p.x, p.topk_slot = x.data_ptr(), topk_slot.data_ptr()
        p.topk_weight = None if topk_weight is None else topk_weight.data_ptr()
        p.num_tokens, p.slot_bytes, p.phases = num_tokens, topk_slot.element_size(), phases
        launch(self.num_sms if phases == SEND | RECV else self.half_sms, self._stream())

    def combine_send(self, i: int, y: Tensor, slot_rows: Tensor, signal: Signal | None = None) -> None:
        """Waits for no other rank. Where dispatch was not given the weights, a row per expert crosses.

        y: bf16, rows as dispatch placed them.
        slot_rows: int32 [L], Rows.count, read with a signal only.
        """
        launch = self._combines[i]
        if self.shape.late_weights:
            launch.use(self._combine_kernels["sum" if self._has_weights[i] else "exact"])
        p = launch.params
        p.y, p.slot_rows, p.phases, p.signal = y.data_ptr(), slot_rows.data_ptr(), SEND, None
        num_sms = self.half_sms
        if signal is not None:
            p.signal, p.threshold = signal.counter.data_ptr(), signal.threshold
            p.block_m, p.slot_tiles, num_sms = signal.block_m, signal.slot_tiles, signal.num_sms
        launch(num_sms, self._stream())

    def combine_recv(
        self,
        i: int,
        num_tokens: int,
        topk_slot: Tensor,
        topk_weight: Tensor,
        out: Tensor,
        y: Tensor | None = None,
        wait_cost: Tensor | None = None,
    ) -> None:
        """Sums into `out`, bf16 [T, H]. The routing is what dispatch was given.

        y: combine_send too, in the same launch, summed before the wire unless the shape is `exact`.
        wait_cost: int64 [R], the caller's own totals of ns waited for each rank.
        """
        launch, num_sms = self._combines[i], self.half_sms
        p = launch.params
        p.topk_slot, p.topk_weight, p.out = topk_slot.data_ptr(), topk_weight.data_ptr(), out.data_ptr()
        p.num_tokens, p.slot_bytes, p.signal = num_tokens, topk_slot.element_size(), None
        p.phases, p.wait_cost = RECV, None if wait_cost is None else wait_cost.data_ptr()
        if y is not None:
            p.y, p.phases, num_sms = y.data_ptr(), SEND | RECV, self.num_sms
            if self.shape.late_weights:
                kernel = self._combine_kernels["sum" if self._has_weights[i] else "late"]
                if launch.kernel is not kernel:
                    launch.use(kernel)
        launch(num_sms, self._stream())

    def close(self) -> None:
        super().close()
        for kernel in (*self._dispatch_kernels.values(), *self._combine_kernels.values()):
            kernel.close()


def kernel_sources(
    shape: LowLatencyHeap, *, profile: bool = False, stats: bool = True, arch: str = "sm_90a"
) -> dict[str, KernelSource]:
    """By name: "fp8" and "bf16" dispatch, and the ways to combine (COMBINES); those that the shape has. profile: with
    time stamps. stats: with counters (KernelTotals)."""
    common = (
        ("HIDDEN", shape.hidden),
        ("TOPK", shape.top_k),
        ("NUM_RANKS", shape.num_ranks),
        ("COMBINE_ROWS", shape.combine_rows),
        ("MESSAGE_BYTES", shape.message_bytes),
        ("PROFILE", int(profile)),
        ("NUM_BUFFERS", shape.num_buffers),
        ("STATS", int(stats)),
    )
    if shape.node_ranks is not None:
        layered = ("LAYERED", int(shape.layered))
        common += ("NODE_RANKS", shape.node_ranks), ("OUTBOX_ROWS", shape.outbox_rows), layered
    sources = {
        payload: KernelSource("low_latency_dispatch", arch, (*common, ("FP8", int(payload == "fp8"))))
        for payload in PAYLOAD_DTYPES
        if shape.payload in (payload, "either")
    }
    fp8 = ("FP8", int(shape.payload == "fp8"))
    for how in ("exact",) if shape.exact else COMBINES if shape.late_weights else ("sum",):
        defines = (*common, fp8, ("EXACT", int(how == "exact")), ("LATE_WEIGHTS", int(how == "late")))
        sources[how] = KernelSource("low_latency_combine", arch, defines)
    return sources
