"""Buffer: DeepEP's calls. Settings, sizes and normal mode are here; the low-latency calls are in low_latency_calls.py.

Checks arguments and returns what DeepEP returns; intranode.py and low_latency.py do the work.

T tokens of this rank, N tokens received, H hidden, K top-k, R ranks, E experts of all ranks.
"""

from typing import Any

import torch
from torch import Tensor

from eprt import env
from eprt.compat.deep_ep.checks import INDEX_DTYPES, BufferChecks, check_machine
from eprt.compat.deep_ep.config import DEFAULT_SMS, Config
from eprt.compat.deep_ep.event import EventHandle, EventOverlap
from eprt.compat.deep_ep.function_modes import without_function_modes
from eprt.compat.deep_ep.intranode import Bias, IntranodeMode, Payload
from eprt.compat.deep_ep.low_latency import LowLatencyShape
from eprt.compat.deep_ep.low_latency_calls import LowLatencyCalls
from eprt.compat.deep_ep.setup import BufferSetup
from eprt.ep.group.group import EPGroup
from eprt.ep.nvlink.rank_mask import RankMask
from eprt.gpu.device import multiprocessors

_ONE_DOMAIN = "eprt.compat.deep_ep connects the GPUs of one NVLink domain"


class Buffer(LowLatencyCalls):
    """The ranks of one NVLink domain. Construction and destroy() are collective.

    group: a torch.distributed process group, or an EPGroup, which stays open.
    comm: an mpi4py communicator, instead of group.
    num_nvl_bytes: symmetric memory of the normal mode, allocated at its first call. It holds the tensors that dispatch
        returns, as long as they live, and combine's rows on their way.
    low_latency_mode: whether low-latency calls will be made. Their memory is allocated at the first call of a shape and
        is a small part of what DeepEP needs. That first call is collective on the host: make it before capturing a
        graph.
    explicitly_destroy: whether destroy() will be called.
    enable_shrink: a rank that is late for longer than the deadline (EPRT_GPU_TIMEOUT_S) is masked and the others go on.
        Otherwise, and in normal mode, the next call raises EPTimeoutError as well.
    exact_combine: eprt's own. low_latency_combine sends every expert's output separately, as DeepEP does, and rounds
        only the sum. Default: it does so only with return_recv_hook; otherwise each rank sums its experts' outputs in
        fp32 and sends one row, rounded to bf16.
    num_rdma_bytes, num_qps_per_rank, allow_nvlink_for_low_latency_mode, allow_mnnvl, use_fabric: without effect,
        because there is no network to set up.
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
            ep_group = group
        else:
            ep_group = EPGroup.from_mpi(comm) if group is None else EPGroup.from_torch(group)
        self.group = comm if group is None else group
        self.rank, self.group_size = ep_group.rank, ep_group.size
        self.num_nvl_bytes, self.num_rdma_bytes = num_nvl_bytes, num_rdma_bytes
        self.low_latency_mode, self.explicitly_destroy = low_latency_mode, explicitly_destroy
        self.enable_shrink = enable_shrink
        checks = BufferChecks(ep_group.rank, ep_group.size, torch.cuda.current_device())
        timeout_s, mask = env.get("EPRT_GPU_TIMEOUT_S"), RankMask(ep_group.size)
        stream = torch.cuda.Stream()
        super().__init__(BufferSetup(ep_group, checks, stream, mask, timeout_s, exact_combine, enable_shrink))
        self._most_sms = multiprocessors()
        self._intranode: IntranodeMode | None = None

    def destroy(self) -> None:
        """Collective. Without explicitly_destroy the memory of a Buffer is freed when the process ends."""
        if not self.explicitly_destroy:
            raise ValueError("Buffer.destroy: this Buffer was made without explicitly_destroy=True")
        if self._destroyed:
            return
        self._close_low_latency()
        if self._intranode is not None:
            self._intranode.close()
        self._setup.mask.close()
        if self._closes_group:
            self._setup.group.close()

    # -- settings and sizes --

    @staticmethod
    def is_sm90_compiled() -> bool:
        """Whether fp8 may be dispatched: always."""
        return True

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        """Sets the SMs of normal-mode calls without a config of their own. Even."""
        Buffer.num_sms = Config(new_num_sms).num_sms

    @staticmethod
    def capture() -> EventOverlap:
        """The present point of the current stream, for previous_event."""
        return EventOverlap(EventHandle())

    @staticmethod
    def get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
    ) -> int:
        """Bytes of symmetric memory that low-latency calls of this shape will take, for up to 8 experts per token."""
        return LowLatencyShape(num_max_dispatch_tokens_per_rank, hidden, num_experts, 8).heap(num_ranks).num_bytes

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        return Config(Buffer.num_sms)

    get_combine_config = get_dispatch_config

    def get_comm_stream(self) -> torch.cuda.Stream:
        """The stream on which calls with async_finish run."""
        return self._setup.stream

    def get_local_buffer_tensor(
        self, dtype: torch.dtype, size: Any = None, offset: int = 0, use_rdma_buffer: bool = False
    ) -> Tensor:
        """A tensor over the network's buffer, which has 0 bytes."""
        if use_rdma_buffer and size is None:
            return torch.empty(0, dtype=dtype, device="cuda")
        raise NotImplementedError("Buffer.get_local_buffer_tensor: eprt has no raw buffer to lend")

    # -- normal mode --

    @without_function_modes
    def get_dispatch_layout(
        self,
        topk_idx: Tensor,
        num_experts: int,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, None, Tensor, Tensor, EventOverlap]:
        """How many tokens go where: (num_tokens_per_rank int32 [R], None, num_tokens_per_expert int32 [E],
        is_token_in_rank bool [T, R], event).

        topk_idx: [T, K]; -1 masks an entry.
        """
        call = "get_dispatch_layout"
        self._checks.check_tensor(call, "topk_idx", topk_idx, INDEX_DTYPES, None, None)
        self._checks.check_experts(call, num_experts)
        self._checks.check_streams(call, previous_event is not None, async_finish, allocate_on_comm_stream)
        return self._normal().layout(topk_idx, num_experts, previous_event, async_finish)

    @without_function_modes
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
        """Sends each token once to each of its ranks. Received rows are ordered by (source rank, token).

        x: [T, H] bf16, or (fp8 [T, H], fp32 scales [T, H / 128] of any strides).
        handle: of an earlier dispatch with the same layout; otherwise pass what get_dispatch_layout returned.
        topk_idx, topk_weights: [T, K], the weights fp32; both or neither.
        num_worst_tokens: the size of the received tensors, known without waiting for the counts, so that the call may
            be captured.

        Returns received rows like x; topk_idx [N, K] (local experts, -1 for those of other ranks); weights [N, K]; rows
        for each local expert, rounded up to expert_alignment ([] with num_worst_tokens); handle; event. With a handle,
        all but the received rows and the event are None.
        """
        self._checks.check_streams("dispatch", previous_event is not None, async_finish, allocate_on_comm_stream)
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
        routing = is_token_in_rank, num_tokens_per_expert, topk_idx, topk_weights
        sizes = expert_alignment, num_worst_tokens, num_sms
        return self._normal().dispatch(x, *routing, *sizes, previous_event, async_finish)

    @without_function_modes
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
        """(bf16 [T, H]: each token's sum over ranks, unweighted; sums of topk_weights [T, K], if given; event).

        x: bf16 [N, H], rows in the order in which dispatch returned them.
        topk_weights: [N, K].
        bias: up to two tensors [T, H] to add.
        """
        self._checks.check_streams("combine", previous_event is not None, async_finish, allocate_on_comm_stream)
        biases = () if bias is None else bias if isinstance(bias, tuple) else (bias,)
        biases = tuple(b for b in biases if b is not None)
        num_sms = self._sms(config)
        return self._normal().combine(x, handle, topk_weights, biases, num_sms, previous_event, async_finish)

    def internode_dispatch(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"internode_dispatch: {_ONE_DOMAIN}")

    def internode_combine(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"internode_combine: {_ONE_DOMAIN}")

    def _sms(self, config: Config | None) -> int:
        return min(Buffer.num_sms if config is None else config.num_sms, self._most_sms)

    def _normal(self) -> IntranodeMode:
        self._check_alive()
        if self._intranode is None:
            self._intranode = IntranodeMode(self._setup, self.num_nvl_bytes)
        return self._intranode
