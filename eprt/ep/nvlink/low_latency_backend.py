"""NvlinkLowLatencyBackend: the EP calls for decoding. Static shapes, fixed addresses, nothing waits for the GPU."""

from typing import Any

import torch
from torch import Tensor

from eprt.ep.api import DispatchHandle, OverlapAdvice, Received
from eprt.ep.config import EPConfig
from eprt.ep.group.group import EPGroup
from eprt.ep.nvlink.backend import NvlinkBackend
from eprt.ep.nvlink.kernel_state import KernelOptions
from eprt.ep.nvlink.low_latency import (
    MAX_ENTRIES,
    MAX_LOCAL_SLOTS,
    MAX_RANKS,
    MAX_SMS,
    MAX_TOP_K,
    LowLatency,
    Rows,
    Signal,
)
from eprt.ep.nvlink.low_latency_layout import LowLatencyHeap
from eprt.ep.nvlink.options import NvlinkOptions
from eprt.gpu.device import multiprocessors

_MAX_SIGNAL_SMS = 64
_SCALE_GROUP = 128


class NvlinkLowLatencyBackend(NvlinkBackend):
    """As NvlinkBackend. Received tensors lie at fixed addresses: x_RH has max_rows rows, of which the first
    sum(recv_count_E) are filled. All calls may be captured in a CUDA graph.

    profile: kernels that record when they pass each stage.
    stats: kernels that count (benchmarks show what that costs).
    """

    _kernels_type: type[LowLatency] = LowLatency

    def __init__(
        self,
        config: EPConfig,
        group: EPGroup,
        options: NvlinkOptions | None = None,
        *,
        profile: bool = False,
        stats: bool = True,
    ):
        options = options or NvlinkOptions()
        max_rows = group.size * config.num_max_tokens_per_rank * config.top_k
        super().__init__(config, group, options, max_rows)
        fp8 = config.payload == "fp8"
        how = KernelOptions(config.timeout_s, stats=stats, profile=profile)
        self.kernels = self._kernels_type(group, self._shape(), max_rows, config.num_buffers, options.num_sms, how)
        self.num_sms = self.kernels.num_sms
        self._rows = [self._new_rows(fp8) for _ in range(config.num_buffers)]
        self._receives = [Received(rows.x, rows.count, rows.scale) for rows in self._rows]
        for i, rows in enumerate(self._rows):
            self.kernels.bind(i, rows)

    def _shape(self) -> LowLatencyHeap:
        config, payload = self.config, "fp8" if self.config.payload == "fp8" else "bf16"
        sizes = self.group.size, config.num_max_tokens_per_rank, config.hidden_size, config.top_k, self._slots_per_rank
        return LowLatencyHeap(*sizes, payload, config.exact_combine, config.num_buffers)

    def _new_rows(self, fp8: bool) -> Rows:
        hidden, groups = self.config.hidden_size, -(-self.config.hidden_size // _SCALE_GROUP)
        dtype = torch.float8_e4m3fn if fp8 else torch.bfloat16
        x = torch.empty(self.max_rows, hidden, dtype=dtype, device="cuda")
        scale = torch.empty(self.max_rows, groups, dtype=torch.float32, device="cuda") if fp8 else None
        count = torch.zeros(self._slots_per_rank, dtype=torch.int32, device="cuda")
        return Rows(x, scale, count, (0, groups, 1))

    def new_signal(self, block_m: int, num_sms: int) -> Signal:
        """For a combine_send whose experts raise its counters by the columns they have stored (ops/signal.py)."""
        slot_tiles = -(-self.group.size * self.config.num_max_tokens_per_rank // block_m)
        counter = torch.zeros(self._slots_per_rank * slot_tiles, dtype=torch.int32, device="cuda")
        return Signal(counter, self.config.hidden_size, block_m, slot_tiles, num_sms)

    def overlap_advice(self) -> OverlapAdvice:
        return OverlapAdvice("sbo", "the shared expert hides part of the exchange")

    # -- inside --

    def _limits(self) -> tuple[tuple[str, int, int, str], ...]:
        config, sms, bound = self.config, multiprocessors(), self.options.max_recv_rows or 0
        entries, num_sms = config.num_max_tokens_per_rank * config.top_k, self.options.num_sms or 1
        return (
            ("expert_alignment", self.options.expert_alignment, 1, "only mode='normal' aligns slots"),
            ("max_recv_rows", bound, 0, "only mode='normal' has a bound; its shapes are static"),
            ("ranks", self.group.size, MAX_RANKS, "use fewer ranks"),
            ("top_k", config.top_k, MAX_TOP_K, "use fewer experts per token"),
            ("slots per rank", self._slots_per_rank, MAX_LOCAL_SLOTS, "spread them over more ranks"),
            ("num_max_tokens_per_rank * top_k", entries, MAX_ENTRIES, "send fewer tokens in one round"),
            ("num_sms", num_sms, min(MAX_SMS, sms), f"this GPU has {sms}, and others must compute"),
        )

    def _check_rounds(self, num_rounds: int) -> None:
        if num_rounds != 1:
            self._checks.fail(
                f"dispatch_send: num_rounds={num_rounds}: with static shapes no rank learns of another's rounds; raise "
                f"num_max_tokens_per_rank={self.config.num_max_tokens_per_rank} to the largest batch"
            )

    def _launch_dispatch(self, handle: DispatchHandle, phases: int) -> None:
        state = handle.state
        T, weights_TK = handle.num_tokens, handle.topk_weights_TK
        self.kernels.dispatch(state.buffer_set, T, state.x_TH, state.slot_idx_TK, weights_TK, phases)

    def _received(self, handle: DispatchHandle) -> Received:
        return self._receives[handle.state.buffer_set]

    def _num_rows(self, handle: DispatchHandle) -> int:
        return self.max_rows

    def _launch_combine_send(self, handle: DispatchHandle, y_RH: Tensor, signal: Signal | None) -> None:
        i = self._set_of(handle)
        self.kernels.combine_send(i, y_RH, self._rows[i].count, signal)

    def _launch_combine_recv(self, handle: DispatchHandle, y_TH: Tensor, y_RH: Tensor | None = None) -> None:
        state = handle.state
        T, weights_TK = handle.num_tokens, handle.topk_weights_TK
        self.kernels.combine_recv(state.buffer_set, T, state.slot_idx_TK, weights_TK, y_TH, y_RH)

    def _check_signal(self, signal: Any) -> None:
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
        if not 1 <= signal.num_sms <= _MAX_SIGNAL_SMS:
            self._checks.fail(f"combine_send: signal.num_sms={signal.num_sms}: must be in 1..{_MAX_SIGNAL_SMS}")
        if signal.slot_tiles * signal.block_m < rows_per_slot:
            self._checks.fail(
                f"combine_send: {signal.slot_tiles} tiles of {signal.block_m} rows do not hold the {rows_per_slot} "
                "rows that a slot may get; size the counters for num_ranks * num_max_tokens_per_rank"
            )
        self._check_on_gpu("combine_send: signal.counter", counter)
