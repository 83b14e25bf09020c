"""LowLatencyCalls: the low-latency half of Buffer. Checks arguments and finds the LowLatencyMode of their shape.

Knows nothing of normal mode.

T tokens of this rank, M at most, H hidden, K top-k, R ranks, L experts of a rank.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from eprt.compat.deep_ep.event import EventOverlap
from eprt.compat.deep_ep.function_modes import without_function_modes
from eprt.compat.deep_ep.intranode import Payload
from eprt.compat.deep_ep.low_latency import BF16, FP8, LowLatencyHandle, LowLatencyMode, LowLatencyShape, RowFormat
from eprt.compat.deep_ep.setup import BufferSetup
from eprt.ep.nvlink.low_latency import EXPONENTS, FLOAT, POWER_OF_TWO

_NO_EVENT = EventOverlap()  # of every call without async_finish


class LowLatencyCalls:
    """Buffer's low-latency calls and its mask."""

    def __init__(self, setup: BufferSetup):
        self._setup, self._checks = setup, setup.checks
        self._low_latency: dict[LowLatencyShape, LowLatencyMode] = {}
        self._recent: tuple[LowLatencyMode, RowFormat] | None = None  # of the last dispatch
        self._destroyed = False

    @without_function_modes
    def low_latency_dispatch(
        self,
        x: Tensor,
        topk_idx: Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        cumulative_local_expert_recv_stats: Tensor | None = None,
        dispatch_wait_recv_cost_stats: Tensor | None = None,
        use_fp8: bool = True,
        round_scale: bool = False,
        use_ue8m0: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        *,
        topk_weights: Tensor | None = None,
    ) -> tuple[Payload, Tensor, LowLatencyHandle, EventOverlap, Callable[[], None] | None]:
        """Sends x, bf16 [T, H], to the ranks of topk_idx [T, K]. M = num_max_dispatch_tokens_per_rank is equal on all.

        cumulative_local_expert_recv_stats: int32 [L], dispatch_wait_recv_cost_stats: int64 [R], ns; both are added to.
        use_fp8: rows arrive as e4m3 with a fp32 scale per 128 values. round_scale: scales are powers of two. use_ue8m0:
            scales are their exponents, four in an int32.
        return_recv_hook: sends only; calling the hook receives, on the same stream.
        topk_weights: eprt's own: fp32 [T, K], as combine will be given them. If all ranks pass them here, outputs are
            summed before they are sent, also in a combine with a hook.

        Returns rows [L, R * M, H] bf16, or (fp8, scales [L, R * M, H / 128], column-major; int32 H / 512 with ue8m0);
        the count, int32 [L], of valid rows, which come first, ordered by (source rank, token); handle; event; hook.
        """
        max_tokens, wait_stats = num_max_dispatch_tokens_per_rank, dispatch_wait_recv_cost_stats
        recv_stats, formats = cumulative_local_expert_recv_stats, (use_fp8, round_scale, use_ue8m0)
        looks_known = self._checks.check_dispatch(
            x,
            topk_idx,
            topk_weights,
            recv_stats,
            wait_stats,
            max_tokens,
            num_experts,
            formats,
            async_finish,
            return_recv_hook,
        )
        if looks_known and self._recent is not None:
            mode, row_format = self._recent
        else:
            self._recent = None
            mode = self._mode(
                LowLatencyShape(max_tokens, x.shape[1], num_experts, topk_idx.shape[1], self._setup.exact)
            )
            scale_format = EXPONENTS if use_ue8m0 else POWER_OF_TWO if round_scale else FLOAT
            row_format = FP8[scale_format] if use_fp8 else BF16
            self._recent = mode, row_format
        weights = None if self._setup.exact else topk_weights
        rows, scale, handle, event, hook = mode.dispatch(
            x, topk_idx, weights, recv_stats, wait_stats, row_format, async_finish, return_recv_hook
        )
        received, count, done = rows if scale is None else (rows, scale), handle.rows_of_expert, _NO_EVENT
        if event is not None:
            done = EventOverlap(event, [x, topk_idx, topk_weights, rows, scale, count, recv_stats, wait_stats])
        return received, count, handle, done, hook

    @without_function_modes
    def low_latency_combine(
        self,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        handle: tuple,
        use_logfmt: bool = False,
        zero_copy: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        out: Tensor | None = None,
        combine_wait_recv_cost_stats: Tensor | None = None,
        *,
        overlap: bool = False,
        packed_recv_count: Tensor | None = None,
        comp_signal: Tensor | None = None,
        block_m: int = 64,
        threshold: int = 0,
        num_sms: int = 3,
    ) -> tuple[Tensor, EventOverlap, Callable[[], None] | None]:
        """(bf16 [T, H]: each token's fp32 sum over k of topk_weights * output; event; hook). x: bf16 [L, R * M, H].

        topk_idx, topk_weights: [T, K], fp32 [T, K]: of this rank's own tokens, as dispatched.
        zero_copy: x lies in the buffer of get_next_low_latency_combine_buffer. Nothing is copied in any case.
        out: where to write. combine_wait_recv_cost_stats: int64 [R], ns; added to.
        overlap: single-batch overlap, with the arguments of DeepEP's antgroup-opt branch; needs return_recv_hook. While
            x is still computed, num_sms thread blocks send each tile of block_m rows of an expert as soon as its
            counter in comp_signal, int32 [L * ceil(R * M / block_m)], has reached threshold. A tile that is not ready
            by the deadline is not sent, and the next call names it. packed_recv_count, int32 [L], is not read: the
            handle has the counts.
        """
        call, check = "low_latency_combine", self._checks
        if use_logfmt:
            raise NotImplementedError(f"{call}: use_logfmt=True (10-bit outputs) is not supported; they cross as bf16")
        if not isinstance(handle, LowLatencyHandle) or handle.mode.kernels.rank_mask is not self._setup.mask:
            check.fail(f"{call}: handle must be the object that low_latency_dispatch of this Buffer returned")
        mode, wait_stats = handle.mode, combine_wait_recv_cost_stats
        check.check_combine(
            x,
            topk_idx,
            topk_weights,
            out,
            wait_stats,
            handle.num_tokens,
            mode.block,
            mode.shape.top_k,
            async_finish,
            return_recv_hook,
        )
        signal = None
        if overlap:
            if not return_recv_hook:
                check.fail(f"{call}: overlap=True needs return_recv_hook=True: the experts still compute")
            signal = check.make_signal(call, comp_signal, packed_recv_count, mode.block, block_m, threshold, num_sms)
        combined, event, hook = mode.combine(
            x, topk_idx, topk_weights, handle, out, wait_stats, signal, zero_copy, async_finish, return_recv_hook
        )
        if event is None:
            return combined, _NO_EVENT, hook
        return combined, EventOverlap(event, [x, topk_idx, topk_weights, combined, wait_stats]), hook

    @without_function_modes
    def get_next_low_latency_combine_buffer(self, handle: tuple) -> Tensor:
        """bf16 [L, R * M, H], to be filled for the next low_latency_combine(zero_copy=True)."""
        if not isinstance(handle, LowLatencyHandle):
            self._checks.fail("get_next_low_latency_combine_buffer: handle must come from low_latency_dispatch")
        return handle.mode.next_combine_buffer()

    @without_function_modes
    def clean_low_latency_buffer(self, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int) -> None:
        """A barrier on the GPU, as with DeepEP. Nothing needs cleaning: flags hold epochs."""
        wanted = num_max_dispatch_tokens_per_rank, hidden, num_experts
        for shape, mode in self._low_latency.items():
            if (shape.max_tokens, shape.hidden, shape.num_experts) == wanted:
                mode.gpu_barrier()

    @without_function_modes
    def low_latency_update_mask_buffer(self, rank_to_mask: int, mask: bool = False) -> None:
        """Masks a rank or readmits it, on this rank only. A rank may be readmitted if it has made all calls.

        To mask one takes effect at once, also in a kernel that waits for it; to readmit, in the order of the stream.
        """
        num_ranks = self._setup.group.size
        if not 0 <= rank_to_mask < num_ranks:
            self._checks.fail(f"low_latency_update_mask_buffer: no rank {rank_to_mask} among {num_ranks}")
        if mask:
            self._setup.mask.write([True], rank_to_mask)
        else:
            self._setup.mask.take_back(rank_to_mask)

    @without_function_modes
    def low_latency_query_mask_buffer(self, mask_status: Tensor) -> None:
        """Writes 1 for masked ranks and 0 for others to mask_status, int32 [R]."""
        call = "low_latency_query_mask_buffer"
        self._checks.check_tensor(call, "mask_status", mask_status, (torch.int32,), self._setup.group.size)
        mask_status.copy_(self._setup.mask.on_gpu)

    @without_function_modes
    def low_latency_clean_mask_buffer(self) -> None:
        """Readmits all ranks."""
        self._setup.mask.take_back()

    def _mode(self, shape: LowLatencyShape) -> LowLatencyMode:
        self._check_alive()
        mode = self._low_latency.get(shape)
        if mode is None:
            self._checks.check_limits(max_tokens=shape.max_tokens, top_k=shape.top_k, num_experts=shape.num_experts)
            if torch.cuda.is_current_stream_capturing():
                self._checks.fail(f"low_latency_dispatch: call it once with {shape} before capturing a CUDA graph")
            mode = self._low_latency[shape] = LowLatencyMode(self._setup, shape)
        return mode

    def _check_alive(self) -> None:
        if self._destroyed:
            raise RuntimeError(f"[rank {self._setup.group.rank}/{self._setup.group.size}] this Buffer is destroyed")

    def _close_low_latency(self) -> None:
        self._destroyed, self._recent = True, None
        for mode in self._low_latency.values():
            mode.close()
