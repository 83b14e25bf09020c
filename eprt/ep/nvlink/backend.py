"""NvlinkBackend: the four verbs between the GPUs of one NVLink domain, one process per GPU.

This file checks, orders and reports; the kernels (low_latency.py, csrc/cuda) move the bytes. Nothing here waits
for the GPU, so every verb may be captured in a CUDA graph. docs/protocol.md explains flags, epochs and buffers.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eprt.ep.api import DispatchHandle, EPConfig, Received
from eprt.ep.checks import Checks
from eprt.ep.group.group import EPGroup
from eprt.ep.nvlink.failure import Asked, take_failure
from eprt.ep.nvlink.low_latency import (
    MAX_ENTRIES,
    MAX_LOCAL_SLOTS,
    MAX_RANKS,
    MAX_TOP_K,
    RECV,
    SEND,
    LowLatency,
    Rows,
    Signal,
)
from eprt.ep.nvlink.low_latency_layout import HeapShape
from eprt.ep.order import COMBINE_RECV, COMBINE_SEND, DISPATCH_RECV, DISPATCH_SEND, VERBS, VerbOrder
from eprt.ep.stats import EPStats
from eprt.gpu.device import multiprocessors
from eprt.gpu.readback import Readback

MAX_SMS = 64
_SCALE_GROUP = 128


@dataclass(frozen=True)
class NvlinkDispatch:
    """DispatchHandle.state. The tensors are this rank's own routing, kept until combine has read it."""

    x_TH: Tensor
    slot_idx_TK: Tensor
    num_rounds: int


class NvlinkBackend:
    """Construction and close() are collective. All calls go to one CUDA stream at a time, in the order of the verbs.

    Received tensors are buffers of the backend at fixed addresses, valid until combine_recv of their handle; x_RH has
    max_rows rows, of which the first sum(recv_count_E) are filled. Tensors passed in must stay unchanged until the GPU
    has done the call.

    A wait past config.timeout_s masks the rank it waited for and lets the kernel go on without that rank's tokens and
    outputs; the next verb raises EPTimeoutError, once, which names the first of those that were late at a time:
    query_mask tells all. A caller that catches it may repeat that verb and go on: other ranks' results stay right.

    This class is the low-latency mode; the normal mode (normal_backend.py) changes where rows go.

    profile: kernels that record when they pass each stage. stats: whether they count (benchmarks/ep/bench_ep.py shows
    what that costs).
    """

    _learns_rounds = False
    can_be_recorded = launches = takes_signals = True

    def __init__(self, config: EPConfig, group: EPGroup, *, profile: bool = False, stats: bool = True):
        self.config, self.group = config, group
        self.max_rows = self._most_rows()
        self._checks = Checks(config, group, self.max_rows, places_rows=config.mode == "normal")
        self._order = VerbOrder(config.num_buffers, self._checks.where)
        self._slots_per_rank = config.num_slots // group.size
        self._started: set[int] = set()  # epochs whose receive has been launched
        self._summed: dict[int, Tensor] = {}  # epoch -> what combine_start has launched the sums into
        self._asked = Asked(group, config.timeout_s, config.top_k, config.num_slots)
        self._check_limits()
        self._device = torch.cuda.current_device()
        self._allocate(profile, stats)
        self._failure = self.kernels.failure
        self._readback: Readback | None = None
        self._closed = False

    def _most_rows(self) -> int:
        return self.group.size * self.config.num_max_tokens_per_rank * self.config.top_k

    def _allocate(self, profile: bool, stats: bool) -> None:
        config, fp8 = self.config, self.config.payload == "fp8"
        shape = HeapShape(
            self.group.size, config.num_max_tokens_per_rank, config.hidden_size, config.top_k, self._slots_per_rank,
            "fp8" if fp8 else "bf16", config.exact_combine, config.num_buffers,
        )  # fmt: skip
        self.num_sms = config.num_sms or min(MAX_SMS, multiprocessors())
        self.kernels: Any = LowLatency(
            self.group, shape, self.max_rows, num_handles=config.num_buffers, num_sms=self.num_sms,
            timeout_s=config.timeout_s, profile=profile, stats=stats,
        )  # fmt: skip
        self._rows = [self._new_rows(fp8) for _ in range(config.num_buffers)]
        for i, rows in enumerate(self._rows):
            self.kernels.bind(i, rows)

    def _check_limits(self) -> None:
        config, fail = self.config, self._checks.fail
        if not torch.cuda.is_available():
            fail("the nvlink backend needs an NVIDIA GPU and a CUDA build of torch; use backend='cpu'")
        if config.dtype != torch.bfloat16:
            fail(f"dtype={config.dtype}: the nvlink backend moves torch.bfloat16; cast, or use backend='cpu'")
        if config.hidden_size % 16:
            fail(f"hidden_size={config.hidden_size}: the nvlink backend needs a multiple of 16; pad the hidden size")
        for what, value, most, remedy in self._limits():
            if value > most:
                fail(f"{what} = {value}: the nvlink backend takes at most {most}; {remedy}")

    def _limits(self) -> tuple[tuple[str, int, int, str], ...]:
        """(what, value, largest, remedy)"""
        config = self.config
        entries, sms = config.num_max_tokens_per_rank * config.top_k, multiprocessors()
        return (
            ("ranks", self.group.size, MAX_RANKS, "use fewer ranks"),
            ("top_k", config.top_k, MAX_TOP_K, "use fewer experts per token"),
            ("slots per rank", self._slots_per_rank, MAX_LOCAL_SLOTS, "spread them over more ranks"),
            ("num_max_tokens_per_rank * top_k", entries, MAX_ENTRIES, "send fewer tokens in one round"),
            ("num_sms", config.num_sms or 1, min(MAX_SMS, sms), f"this GPU has {sms}, and others must compute"),
        )

    def _new_rows(self, fp8: bool) -> Rows:
        """Receive buffers of one handle."""
        hidden, groups = self.config.hidden_size, -(-self.config.hidden_size // _SCALE_GROUP)
        dtype = torch.float8_e4m3fn if fp8 else torch.bfloat16
        x = torch.empty(self.max_rows, hidden, dtype=dtype, device="cuda")
        scale = torch.empty(self.max_rows, groups, dtype=torch.float32, device="cuda") if fp8 else None
        count = torch.zeros(self._slots_per_rank, dtype=torch.int32, device="cuda")
        return Rows(x, scale, count, (0, groups, 1))

    # -- the four verbs --

    def dispatch_send(
        self, x_TH: Tensor, slot_idx_TK: Tensor, topk_weights_TK: Tensor, num_rounds: int = 1
    ) -> DispatchHandle:
        handle = self._begin(x_TH, slot_idx_TK, topk_weights_TK, num_rounds)
        self._launch_dispatch(handle, SEND)
        return handle

    def dispatch_start(self, handle: DispatchHandle) -> None:
        self._enter(DISPATCH_RECV, handle)
        self._launch_dispatch(handle, RECV)
        self._started.add(handle.epoch)

    def dispatch_recv(self, handle: DispatchHandle) -> Received:
        self._enter(DISPATCH_RECV, handle)
        if handle.epoch not in self._started:
            self._launch_dispatch(handle, RECV)
        self._started.discard(handle.epoch)
        return self._received(handle)

    def combine_buffer(self, handle: DispatchHandle) -> Tensor:
        """Kernels send from any memory of the GPU, so this is a new tensor."""
        self._enter(COMBINE_SEND, handle)
        rows = self._num_rows(handle)
        return torch.empty(rows, self.config.hidden_size, dtype=self.config.dtype, device="cuda")

    def combine_send(self, y_RH: Tensor, handle: DispatchHandle, signal: Signal | None = None) -> None:
        """signal: send tile by tile while the experts still compute (needs no order of slots, only progress)."""
        i = self._enter(COMBINE_SEND, handle)
        self._check_outputs(y_RH, handle, signal)
        self._launch_combine_send(i, y_RH, signal)
        self._order.done(COMBINE_SEND, handle.epoch)

    def combine_start(self, handle: DispatchHandle) -> None:
        self._summed[handle.epoch] = self._sum(handle)

    def combine_recv(self, handle: DispatchHandle) -> Tensor:
        if handle.backend is self and handle.epoch in self._summed:
            self._raise_failure()
            return self._summed.pop(handle.epoch)
        return self._sum(handle)

    def new_signal(self, block_m: int, num_sms: int) -> Signal:
        """For a combine_send whose experts raise its counters by the columns they have stored (ops.signal).

        block_m: rows of a tile. num_sms: thread blocks to send with.
        """
        slot_tiles = -(-self.group.size * self.config.num_max_tokens_per_rank // block_m)
        counter = torch.zeros(self._slots_per_rank * slot_tiles, dtype=torch.int32, device="cuda")
        return Signal(counter, self.config.hidden_size, block_m, slot_tiles, num_sms)

    # -- two verbs in one launch: less latency when there is nothing to compute in between --

    def dispatch(self, x_TH: Tensor, slot_idx_TK: Tensor, topk_weights_TK: Tensor) -> tuple[DispatchHandle, Received]:
        """dispatch_send and dispatch_recv."""
        handle = self._begin(x_TH, slot_idx_TK, topk_weights_TK, 1)
        self._launch_dispatch(handle, SEND | RECV)
        return handle, self._received(handle)

    def combine(self, y_RH: Tensor, handle: DispatchHandle) -> Tensor:
        """combine_send and combine_recv."""
        i = self._enter(COMBINE_SEND, handle)
        self._check_outputs(y_RH, handle, None)
        self._order.done(COMBINE_SEND, handle.epoch)
        try:
            self._order.check(COMBINE_RECV, handle.epoch)
        except RuntimeError:  # out of order: what may go, goes, as with the two verbs
            self._launch_combine_send(i, y_RH, None)
            raise
        y_TH = torch.empty_like(handle.state.x_TH)
        self._launch_combine_recv(i, handle, y_TH, y_RH)
        self._order.done(COMBINE_RECV, handle.epoch)
        return y_TH

    # -- beside the verbs --

    def mask_rank(self, rank: int, masked: bool = True) -> None:
        """Goes on without a rank: nothing is sent to it, nobody waits for it, its outputs add nothing.

        On this rank only: every rank decides, or learns at its deadline. masked=False takes back a rank that has made
        all calls; after missed ones, use readmit.
        """
        if not 0 <= rank < self.group.size or rank == self.group.rank:
            self._checks.fail(f"mask_rank({rank}): name another rank of 0..{self.group.size - 1}")
        self.kernels.mask[rank] = int(masked)

    def readmit(self) -> None:
        """Goes on with all ranks again, those included that were masked and have missed calls.

        Collective: every rank of the group calls it, between two steps, with no handle in flight. Waits for the GPU and
        for the other ranks. A rank whose process has died cannot come back: make a new group. RuntimeError, on all
        ranks, when one has a handle in flight.
        """
        self._check_open("readmit")
        everyone = self.group.allgather((self._order.num_completed, self._order.in_flight))
        if problem := next((problem for _, problem in everyone if problem), None):
            raise RuntimeError(problem)
        self._order.restart(max(completed for completed, _ in everyone))
        self.kernels.readmit()
        take_failure(self._failure.words, self._asked)

    def query_mask(self) -> Tensor:
        """int32 [N] on the GPU: 1 for masked ranks."""
        return self.kernels.mask.clone()

    def stats(self, reset: bool = False) -> EPStats:
        """What the kernels counted since the last reset. Waits for the GPU. Waits are as thread block 0 saw them."""
        self._check_open("stats")
        totals = [total.cpu().numpy().copy() for total in self.kernels.totals()]
        if reset:
            for total in self.kernels.totals():
                total.zero_()
        return _stats_of(*totals)

    def recent_stats(self) -> EPStats:
        """The same without waiting: of a GPU that is busy, as recent as Readback says."""
        self._check_open("recent_stats")
        self._readback = self._readback or Readback(self.kernels.totals())
        return _stats_of(*self._readback.read())

    def max_wait_us(self) -> np.ndarray:
        """float64 [2, N]: the longest single wait of dispatch and of combine for each rank since the last reset."""
        return self.kernels.wait_ns[:, 1].cpu().numpy() / 1e3

    def check(self) -> None:
        """Raises what a kernel has reported by now and no verb has raised yet, once. Does not wait for the GPU."""
        self._raise_failure()

    def close(self) -> None:
        """Frees all memory. Collective while all ranks live; never hangs when some do not."""
        if not self._closed:
            self._closed = True
            self.kernels.close()

    # -- inside --

    def _begin(self, x_TH: Tensor, slot_idx_TK: Tensor, topk_weights_TK: Tensor, num_rounds: int) -> DispatchHandle:
        self._check_open("dispatch_send")
        self._checks.tokens(x_TH, slot_idx_TK, topk_weights_TK, num_rounds)
        if not x_TH.get_device() == slot_idx_TK.get_device() == topk_weights_TK.get_device() == self._device:
            for name, tensor in (("x_TH", x_TH), ("slot_idx_TK", slot_idx_TK), ("topk_weights_TK", topk_weights_TK)):
                self._check_on_gpu(f"dispatch_send: {name}", tensor)
        if num_rounds != 1 and not self._learns_rounds:
            self._checks.fail(
                f"dispatch_send: num_rounds={num_rounds}: with static shapes no rank learns of another's rounds; raise "
                f"num_max_tokens_per_rank={self.config.num_max_tokens_per_rank} to the largest batch"
            )
        x_TH = x_TH.contiguous()
        self._checks.aligned("dispatch_send: x_TH", x_TH)
        self._raise_failure()
        epoch = self._order.next_epoch()
        self._order.done(DISPATCH_SEND, epoch)
        state = NvlinkDispatch(x_TH, slot_idx_TK.contiguous(), num_rounds)
        return DispatchHandle(x_TH.shape[0], epoch, topk_weights_TK.contiguous(), self, state)

    def _sum(self, handle: DispatchHandle) -> Tensor:
        i = self._enter(COMBINE_RECV, handle)
        y_TH = torch.empty_like(handle.state.x_TH)
        self._launch_combine_recv(i, handle, y_TH)
        self._order.done(COMBINE_RECV, handle.epoch)
        return y_TH

    def _launch_dispatch(self, handle: DispatchHandle, phases: int) -> None:
        i, state = handle.epoch % self.config.num_buffers, handle.state
        self.kernels.dispatch(i, state.x_TH, state.slot_idx_TK, handle.topk_weights_TK, phases)

    def _launch_combine_send(self, i: int, y_RH: Tensor, signal: Signal | None) -> None:
        self.kernels.combine_send(i, y_RH, self._rows[i].count, signal)

    def _launch_combine_recv(self, i: int, handle: DispatchHandle, y_TH: Tensor, y_RH: Tensor | None = None) -> None:
        self.kernels.combine_recv(i, handle.state.slot_idx_TK, handle.topk_weights_TK, y_TH, y_RH)

    def _num_rows(self, handle: DispatchHandle) -> int:
        """Of x_RH and y_RH."""
        return self.max_rows

    def _received(self, handle: DispatchHandle) -> Received:
        rows = self._rows[handle.epoch % self.config.num_buffers]
        self._order.done(DISPATCH_RECV, handle.epoch)
        return Received(rows.x, rows.count, rows.scale)

    def _enter(self, verb: int, handle: DispatchHandle) -> int:
        """Checks that it is this handle's turn for this verb; returns its buffer."""
        self._check_open(VERBS[verb])
        self._checks.own(verb, handle, self)
        self._raise_failure()
        self._order.check(verb, handle.epoch)
        return handle.epoch % self.config.num_buffers

    def _check_outputs(self, y_RH: Tensor, handle: DispatchHandle, signal: Signal | None) -> None:
        self._checks.outputs(y_RH, self._num_rows(handle))
        self._check_on_gpu("combine_send: y_RH", y_RH)
        if not y_RH.is_contiguous():
            self._checks.fail("combine_send: y_RH is not contiguous; a copy here would hide a slow path")
        self._checks.aligned("combine_send: y_RH", y_RH)
        if signal is None:
            return
        rows_per_slot = self.max_rows // self.config.top_k
        counter, counters = signal.counter, signal.counter.numel()
        if counter.dtype not in (torch.int32, torch.uint32) or not counter.is_contiguous():
            self._checks.fail(
                f"combine_send: signal.counter is {counter.dtype}, strides {counter.stride()}; expected contiguous "
                "torch.int32 or torch.uint32"
            )
        if not 1 <= signal.threshold < 2**32:
            self._checks.fail(f"combine_send: signal.threshold={signal.threshold}: must be in 1..{2**32 - 1}")
        if signal.block_m < 1 or signal.slot_tiles < 1 or counters != self._slots_per_rank * signal.slot_tiles:
            self._checks.fail(
                f"combine_send: signal has {counters} counters, block_m={signal.block_m}, slot_tiles="
                f"{signal.slot_tiles}; expected slots * slot_tiles = {self._slots_per_rank} * {signal.slot_tiles}"
            )
        if not 1 <= signal.num_sms <= MAX_SMS:
            self._checks.fail(f"combine_send: signal.num_sms={signal.num_sms}: must be in 1..{MAX_SMS}")
        if signal.slot_tiles * signal.block_m < rows_per_slot:
            self._checks.fail(
                f"combine_send: {signal.slot_tiles} tiles of {signal.block_m} rows do not hold the {rows_per_slot} "
                "rows that a slot may get; size the counters for num_ranks * num_max_tokens_per_rank"
            )
        self._check_on_gpu("combine_send: signal.counter", signal.counter)

    def _check_on_gpu(self, what: str, tensor: Tensor) -> None:
        if tensor.get_device() != self._device:
            self._checks.fail(f"{what} is on {tensor.device}; the nvlink backend takes tensors of this rank's GPU")

    def _raise_failure(self) -> None:
        """Raises what a kernel has reported since the last time, once."""
        if error := take_failure(self._failure.words, self._asked):
            self.kernels.mask[self.group.rank].zero_()  # it waited for itself: for a tile that did not come
            raise error

    def _check_open(self, verb: str) -> None:
        if self._closed:
            raise RuntimeError(f"{self._checks.where} {verb}: this backend is closed")


def _stats_of(wait_ns, tokens, slot_rows, calls, compute_ns, blocked_ns) -> EPStats:
    """From the kernels' totals; see LowLatency.totals()."""
    return EPStats(
        num_calls=int(calls[0]),
        dispatch_wait_us_N=wait_ns[0, 0] / 1e3,
        combine_wait_us_N=wait_ns[1, 0] / 1e3,
        recv_tokens_N=tokens[1],
        sent_tokens_N=tokens[0],
        slot_rows_E=slot_rows,
        compute_us=float(compute_ns[0]) / 1e3,
        blocked_us=float(blocked_ns[0]) / 1e3,
    )


def make_nvlink(config: EPConfig, group: EPGroup) -> NvlinkBackend:
    """The backend of config.mode."""
    if config.mode == "low_latency":
        return NvlinkBackend(config, group)
    from eprt.ep.nvlink.normal_backend import NvlinkNormalBackend

    return NvlinkNormalBackend(config, group)


__all__ = ["NvlinkBackend", "Signal", "make_nvlink"]
