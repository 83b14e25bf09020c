"""Buffer: DeepEP v1's calls, checked here and done by intranode.py and low_latency.py.

T tokens of this rank, M at most, N tokens received, H hidden, K top-k, R ranks, E experts of all ranks, L of a rank.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from eprt import env
from eprt.compat.deep_ep.checks import INDEX_DTYPES, Checks, check_machine
from eprt.compat.deep_ep.config import DEFAULT_SMS, Config
from eprt.compat.deep_ep.event import EventHandle, EventOverlap
from eprt.compat.deep_ep.intranode import Bias, IntranodeMode, Payload
from eprt.compat.deep_ep.low_latency import BF16, FP8, Kind, LowLatencyHandle, LowLatencyMode, Shape
from eprt.compat.deep_ep.plain import plain
from eprt.ep.group.group import EPGroup
from eprt.ep.nvlink.low_latency import EXPONENTS, FLOAT, POWER_OF_TWO
from eprt.gpu.device import multiprocessors

_ONE_DOMAIN = "eprt.compat.deep_ep connects the GPUs of one NVLink domain"


class Buffer:
    """The ranks of one NVLink domain. Construction and destroy() are collective.

    group: a torch.distributed process group, or an EPGroup (which stays open); or comm: an mpi4py communicator.
    num_nvl_bytes: symmetric memory of the normal mode, allocated at its first call. It holds what dispatch returns for
        as long as those tensors live, and combine's rows on their way.
    low_latency_mode: low-latency calls are meant to be made. Their memory is allocated at the first call of a shape,
        and is a small part of what DeepEP asks for. That first call is collective on the host: make it before
        capturing a graph.
    enable_shrink: a rank that is late for longer than the deadline (EPRT_GPU_TIMEOUT_S) is masked and the others go
        on. Without, and in normal mode, the next call raises EPTimeoutError, too.
    exact_combine: eprt's own. low_latency_combine sends every expert's output by itself, as DeepEP does, and rounds
        only the sum. Default: so only with return_recv_hook; else each rank sums its experts' outputs in fp32 first and
        sends one row, rounded to bf16.
    Accepted without effect, for there is no network to set up: num_rdma_bytes, num_qps_per_rank,
    allow_nvlink_for_low_latency_mode, allow_mnnvl, use_fabric.
    """

    num_sms: int = DEFAULT_SMS

    def __init__(
        self,
        group: Any = None,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 24,
        allow_nvlink_for_low_latency_mode: bool = True,
        allow_mnnvl: bool = False,
        use_fabric: bool = False,
        explicitly_destroy: bool = False,
        enable_shrink: bool = False,
        comm: Any = None,
        *,
        exact_combine: bool = False,
    ):
        if group is None and comm is None:
            raise ValueError("Buffer: pass group, a torch.distributed process group, or comm, an mpi4py communicator")
        check_machine()
        self._closes_group = not isinstance(group, EPGroup)
        if isinstance(group, EPGroup):
            self._ep_group = group
        else:
            self._ep_group = EPGroup.from_mpi(comm) if group is None else EPGroup.from_torch(group)
        self.group = comm if group is None else group
        self.rank, self.group_size = self._ep_group.rank, self._ep_group.size
        self.num_nvl_bytes, self.num_rdma_bytes = num_nvl_bytes, num_rdma_bytes
        self.low_latency_mode, self.enable_shrink = low_latency_mode, enable_shrink
        self.explicitly_destroy, self._exact = explicitly_destroy, exact_combine
        self._checks = Checks(self.rank, self.group_size, torch.cuda.current_device())
        self._timeout_s = env.get("EPRT_GPU_TIMEOUT_S")
        self._most_sms = multiprocessors()
        self._comm_stream = torch.cuda.Stream()
        self._mask: Tensor = torch.zeros(self.group_size, dtype=torch.int32, device="cuda")
        self._low_latency: dict[Shape, LowLatencyMode] = {}
        self._recent: tuple[LowLatencyMode, Kind] | None = None  # of the last dispatch
        self._intranode: IntranodeMode | None = None
        self._destroyed = False

    def destroy(self) -> None:
        """Collective. Memory of a Buffer without explicitly_destroy goes with the process."""
        if not self.explicitly_destroy:
            raise ValueError("Buffer.destroy: this Buffer was made without explicitly_destroy=True")
        if self._destroyed:
            return
        self._destroyed, self._recent = True, None
        for mode in (*self._low_latency.values(), self._intranode):
            if mode is not None:
                mode.close()
        if self._closes_group:
            self._ep_group.close()

    # -- settings and sizes --

    @staticmethod
    def is_sm90_compiled() -> bool:
        """Whether fp8 may be dispatched: always."""
        return True

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        """SMs of normal-mode calls without a config of their own. Even."""
        Buffer.num_sms = Config(new_num_sms).num_sms

    @staticmethod
    def capture() -> EventOverlap:
        """The current stream's present point, for previous_event."""
        return EventOverlap(EventHandle())

    @staticmethod
    def get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
    ) -> int:
        """Bytes of symmetric memory that low-latency calls of this shape will take, for up to 8 experts per token."""
        return Shape(num_max_dispatch_tokens_per_rank, hidden, num_experts, 8).heap(num_ranks).num_bytes

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        return Config(Buffer.num_sms)

    get_combine_config = get_dispatch_config

    def get_comm_stream(self) -> torch.cuda.Stream:
        """Where calls with async_finish run."""
        return self._comm_stream

    def get_local_buffer_tensor(
        self, dtype: torch.dtype, size: Any = None, offset: int = 0, use_rdma_buffer: bool = False
    ) -> Tensor:
        """Of the network's buffer, which has 0 bytes."""
        if use_rdma_buffer and size is None:
            return torch.empty(0, dtype=dtype, device="cuda")
        raise NotImplementedError("Buffer.get_local_buffer_tensor: eprt has no raw buffer to lend")

    # -- normal mode --

    @plain
    def get_dispatch_layout(
        self,
        topk_idx: Tensor,
        num_experts: int,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, None, Tensor, Tensor, EventOverlap]:
        """Who gets how much. topk_idx [T, K], -1 masks.

        -> num_tokens_per_rank int32 [R], None, num_tokens_per_expert int32 [E], is_token_in_rank bool [T, R], event.
        """
        call = "get_dispatch_layout"
        self._checks.tensor(call, "topk_idx", topk_idx, INDEX_DTYPES, None, None)
        self._checks.experts(call, num_experts)
        self._checks.own_stream(call, previous_event is not None, async_finish, allocate_on_comm_stream)
        return self._normal().layout(topk_idx, num_experts, previous_event, async_finish)

    @plain
    def dispatch(
        self,
        x: Payload,
        handle: tuple | None = None,
        num_tokens_per_rank: Tensor | None = None,
        num_tokens_per_rdma_rank: Tensor | None = None,
        is_token_in_rank: Tensor | None = None,
        num_tokens_per_expert: Tensor | None = None,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Payload, Tensor | None, Tensor | None, list[int] | None, tuple | None, EventOverlap]:
        """Each token once to each rank it goes to; rows come ordered by (source rank, token).

        x: [T, H] bf16, or (fp8 [T, H], fp32 scales [T, H / 128] of any strides). Either handle, of an earlier dispatch
        with the same layout, or what get_dispatch_layout gave, with topk_idx [T, K] and topk_weights fp32 or without.
        num_worst_tokens: size of the received tensors, known without waiting for the counts; the call may be captured.
        -> received like x, topk_idx [N, K] (local experts, -1 for those of other ranks), weights [N, K], rows for each
        local expert rounded up to expert_alignment ([] with num_worst_tokens), handle, event. With handle: the received
        and the event, else None.
        """
        self._checks.own_stream("dispatch", previous_event is not None, async_finish, allocate_on_comm_stream)
        num_sms = self._sms(config)
        if handle is not None:
            if topk_idx is not None or topk_weights is not None:
                self._checks.fail("dispatch: with a handle, topk_idx and topk_weights must be None")
            received, event = self._normal().dispatch_again(x, handle, num_sms, previous_event, async_finish)
            return received, None, None, None, None, event
        if is_token_in_rank is None or num_tokens_per_rank is None or num_tokens_per_expert is None:
            self._checks.fail("dispatch: without a handle, pass all that get_dispatch_layout gives")
        if (topk_idx is None) != (topk_weights is None):
            self._checks.fail("dispatch: topk_idx and topk_weights go together")
        if num_worst_tokens and topk_idx is None:
            self._checks.fail(f"dispatch: num_worst_tokens={num_worst_tokens} needs topk_idx, to tell rows from none")
        return self._normal().dispatch(
            x, is_token_in_rank, num_tokens_per_expert, topk_idx, topk_weights, expert_alignment, num_worst_tokens,
            num_sms, previous_event, async_finish,
        )  # fmt: skip

    @plain
    def combine(
        self,
        x: Tensor,
        handle: tuple,
        topk_weights: Tensor | None = None,
        bias: Bias = None,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, EventOverlap]:
        """x bf16 [N, H], rows as dispatch gave them -> bf16 [T, H], each token's sum over ranks, unweighted, plus up to
        two biases [T, H]; with topk_weights [N, K], also their sums [T, K]; event."""
        self._checks.own_stream("combine", previous_event is not None, async_finish, allocate_on_comm_stream)
        biases = () if bias is None else bias if isinstance(bias, tuple) else (bias,)
        return self._normal().combine(
            x, handle, topk_weights, tuple(b for b in biases if b is not None), self._sms(config), previous_event,
            async_finish,
        )  # fmt: skip

    def internode_dispatch(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"internode_dispatch: {_ONE_DOMAIN}")

    def internode_combine(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"internode_combine: {_ONE_DOMAIN}")

    # -- low latency --

    @plain
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
        """x bf16 [T, H] to the ranks of topk_idx [T, K]; T at most M = num_max_dispatch_tokens_per_rank, equal on all.

        use_fp8: rows come as e4m3 with fp32 scales of 128 values each; round_scale: powers of two; use_ue8m0: their
        exponents, four in an int32. cumulative_local_expert_recv_stats: int32 [L], dispatch_wait_recv_cost_stats: int64
        [R], ns: added to. return_recv_hook: send only; calling the hook receives, on the same stream.
        topk_weights: eprt's own. fp32 [T, K], as combine will be given them. Passed here, by all ranks or none, outputs
        are summed before the wire also in a combine with a hook.
        -> rows [L, R * M, H] bf16, or (fp8, scales [L, R * M, H / 128], column-major; int32 H / 512 with ue8m0); count
        int32 [L] of the valid ones, which come first, ordered by (source rank, token); handle; event; hook.
        """
        max_tokens, wait_stats = num_max_dispatch_tokens_per_rank, dispatch_wait_recv_cost_stats
        recv_stats = cumulative_local_expert_recv_stats
        as_before = self._checks.low_latency_dispatch(
            x, topk_idx, topk_weights, recv_stats, wait_stats, max_tokens, num_experts,
            (use_fp8, round_scale, use_ue8m0), async_finish, return_recv_hook,
        )  # fmt: skip
        if as_before and self._recent is not None:
            mode, kind = self._recent
        else:
            self._recent = None
            mode = self._mode(Shape(max_tokens, x.shape[1], num_experts, topk_idx.shape[1], self._exact))
            kind = FP8[EXPONENTS if use_ue8m0 else POWER_OF_TWO if round_scale else FLOAT] if use_fp8 else BF16
            self._recent = mode, kind
        rows, scale, handle, event, hook = mode.dispatch(
            x, topk_idx, None if self._exact else topk_weights, recv_stats, wait_stats, kind,
            async_finish=async_finish, return_recv_hook=return_recv_hook,
        )  # fmt: skip
        received, count = rows if scale is None else (rows, scale), handle.rows_of_expert
        keep = None if event is None else [x, topk_idx, topk_weights, rows, scale, count, recv_stats, wait_stats]
        return received, count, handle, EventOverlap(event, keep), hook

    @plain
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
        """x bf16 [L, R * M, H] -> bf16 [T, H], each token's fp32 sum over k of topk_weights * output; event; hook.

        topk_idx [T, K], topk_weights fp32 [T, K]: of this rank's own tokens, as dispatched. zero_copy: x lies in the
        buffer of get_next_low_latency_combine_buffer, if that was asked for; nothing is copied in any case. out: where
        to write. combine_wait_recv_cost_stats: int64 [R], ns: added to.
        overlap: single-batch overlap, with the arguments of DeepEP's antgroup-opt branch; needs return_recv_hook. x is
        still being computed: num_sms thread blocks send each tile of block_m rows of an expert once its counter in
        comp_signal, int32 [L * ceil(R * M / block_m)], is at least threshold. A tile that does not come by the deadline
        is not sent, and the next call names it. packed_recv_count: int32 [L]; the handle's own is what is read.
        """
        call, check = "low_latency_combine", self._checks
        if use_logfmt:
            raise NotImplementedError(f"{call}: use_logfmt=True (10-bit outputs) is not supported; they cross as bf16")
        if not isinstance(handle, LowLatencyHandle) or handle.mode.kernels.mask is not self._mask:
            check.fail(f"{call}: handle must be the object that low_latency_dispatch of this Buffer returned")
        mode, wait_stats = handle.mode, combine_wait_recv_cost_stats
        check.low_latency_combine(
            x, topk_idx, topk_weights, out, wait_stats, handle.num_tokens, mode.block, mode.shape.top_k, async_finish,
            return_recv_hook,
        )  # fmt: skip
        signal = None
        if overlap:
            if not return_recv_hook:
                check.fail(f"{call}: overlap=True needs return_recv_hook=True: the experts still compute")
            signal = check.signal(call, comp_signal, packed_recv_count, mode.block, block_m, threshold, num_sms)
        combined, event, hook = mode.combine(
            x, topk_idx, topk_weights, handle, out, wait_stats, signal, zero_copy=zero_copy,
            async_finish=async_finish, return_recv_hook=return_recv_hook,
        )  # fmt: skip
        keep = None if event is None else [x, topk_idx, topk_weights, combined, wait_stats]
        return combined, EventOverlap(event, keep), hook

    @plain
    def get_next_low_latency_combine_buffer(self, handle: tuple) -> Tensor:
        """bf16 [L, R * M, H] to be filled for the next low_latency_combine(zero_copy=True)."""
        if not isinstance(handle, LowLatencyHandle):
            self._checks.fail("get_next_low_latency_combine_buffer: handle must come from low_latency_dispatch")
        return handle.mode.next_combine_buffer()

    @plain
    def clean_low_latency_buffer(self, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int) -> None:
        """Nothing needs cleaning: flags carry epochs. All ranks meet on the GPU, as with DeepEP."""
        wanted = num_max_dispatch_tokens_per_rank, hidden, num_experts
        for shape, mode in self._low_latency.items():
            if (shape.max_tokens, shape.hidden, shape.num_experts) == wanted:
                mode.meet()

    @plain
    def low_latency_update_mask_buffer(self, rank_to_mask: int, mask: bool = False) -> None:
        """Goes on without a rank, or with it again; on this rank only. It may return if it has made all calls."""
        if not 0 <= rank_to_mask < self.group_size:
            self._checks.fail(f"low_latency_update_mask_buffer: no rank {rank_to_mask} among {self.group_size}")
        self._mask[rank_to_mask] = int(mask)

    @plain
    def low_latency_query_mask_buffer(self, mask_status: Tensor) -> None:
        """Writes 1 for masked ranks, 0 for others, to mask_status int32 [R]."""
        call = "low_latency_query_mask_buffer"
        self._checks.tensor(call, "mask_status", mask_status, (torch.int32,), self.group_size)
        mask_status.copy_(self._mask)

    @plain
    def low_latency_clean_mask_buffer(self) -> None:
        """Goes on with all ranks."""
        self._mask.zero_()

    # -- inside --

    def _sms(self, config: Config | None) -> int:
        return min(Buffer.num_sms if config is None else config.num_sms, self._most_sms)

    def _mode(self, shape: Shape) -> LowLatencyMode:
        self._check_alive()
        mode = self._low_latency.get(shape)
        if mode is None:
            self._checks.limits(max_tokens=shape.max_tokens, top_k=shape.top_k, num_experts=shape.num_experts)
            if torch.cuda.is_current_stream_capturing():
                self._checks.fail(f"low_latency_dispatch: call it once with {shape} before capturing a CUDA graph")
            mode = LowLatencyMode(
                self._ep_group, shape, stream=self._comm_stream, mask=self._mask, shrink=self.enable_shrink,
                timeout_s=self._timeout_s,
            )  # fmt: skip
            self._low_latency[shape] = mode
        return mode

    def _normal(self) -> IntranodeMode:
        self._check_alive()
        if self._intranode is None:
            self._intranode = IntranodeMode(
                self._ep_group, self.num_nvl_bytes, stream=self._comm_stream, checks=self._checks,
                timeout_s=self._timeout_s, mask=self._mask,
            )  # fmt: skip
        return self._intranode

    def _check_alive(self) -> None:
        if self._destroyed:
            raise RuntimeError(f"[rank {self.rank}/{self.group_size}] this Buffer is destroyed")
