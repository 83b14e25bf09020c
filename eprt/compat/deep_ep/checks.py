"""BufferChecks: checks of the arguments of a Buffer's calls. Errors name the rank, the argument and what is expected.

Knows nothing of kernels but their limits.
"""

from typing import NoReturn

import torch
from torch import Tensor

from eprt import env
from eprt.ep.checks import not_aligned
from eprt.ep.nvlink.low_latency import MAX_ENTRIES, MAX_LOCAL_SLOTS, MAX_RANKS, MAX_TOP_K, Signal

MAX_SIGNAL_SMS = 64  # that a call uses which sends tile by tile, at most
INDEX_DTYPES = (torch.int64, torch.int32)


def facts(value: Tensor | None) -> tuple | None:
    """All that the checks ask of a tensor, but its address."""
    return None if value is None else (value.shape, value.dtype, value.get_device(), value.is_contiguous())


def check_machine() -> None:
    """ValueError if no Buffer can be made here."""
    if not torch.cuda.is_available():
        raise ValueError(f"Buffer: needs an NVIDIA GPU and a CUDA build of torch; torch {torch.__version__} finds none")
    env.check()  # a misspelt variable would leave its default in effect


class BufferChecks:
    """Checks of one rank's Buffer.

    Low-latency calls whose arguments look like those of the last good call are not checked again: a check takes about
    as long as the GPU needs for a whole step of one token.
    """

    def __init__(self, rank: int, num_ranks: int, device: int):
        self._where, self._num_ranks, self._device = f"[rank {rank}/{num_ranks}]", num_ranks, device
        self._good_dispatch: tuple | None = None
        self._good_combine: tuple | None = None

    def check_tensor(
        self, call: str, name: str, value: Tensor, dtypes: tuple[torch.dtype, ...], *shape: int | None
    ) -> None:
        """ValueError unless value is a contiguous tensor on the GPU. shape: None for a dimension of any length."""
        got = value.shape
        fits = value.dtype in dtypes and len(got) == len(shape)
        if fits:  # a loop is faster than a generator; this runs several times per call
            for want, length in zip(shape, got):
                fits = fits and (want is None or want == length)
        if not fits:
            want = ", ".join("any" if length is None else str(length) for length in shape)
            names = " or ".join(map(str, dtypes))
            self.fail(f"{call}: {name} is {value.dtype} {tuple(value.shape)}, expected {names} ({want})")
        if value.get_device() != self._device:
            self.fail(f"{call}: {name} is on {value.device}; pass a tensor of this rank's GPU")
        if not value.is_contiguous():
            self.fail(f"{call}: {name} is not contiguous")

    def check_experts(self, call: str, num_experts: int) -> None:
        if num_experts < 1 or num_experts % self._num_ranks:
            self.fail(f"{call}: num_experts={num_experts} is not a positive multiple of the {self._num_ranks} ranks")

    def check_dispatch(
        self,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor | None,
        recv_stats: Tensor | None,
        wait_stats: Tensor | None,
        max_tokens: int,
        num_experts: int,
        formats: tuple[bool, bool, bool],
        async_finish: bool,
        return_recv_hook: bool,
    ) -> bool:
        """Whether everything looks as in the last good call. formats: use_fp8, round_scale, use_ue8m0."""
        asked = max_tokens, num_experts, formats, async_finish, return_recv_hook, x.data_ptr() % 16
        # facts(), written out for tensors that are never None: a call costs as much time.
        of_x = x.shape, x.dtype, x.get_device(), x.is_contiguous()
        of_idx = topk_idx.shape, topk_idx.dtype, topk_idx.get_device(), topk_idx.is_contiguous()
        looks = asked, of_x, of_idx, facts(topk_weights), facts(recv_stats), facts(wait_stats)
        if looks == self._good_dispatch:
            return True
        call = "low_latency_dispatch"
        self._check_async_or_hook(call, async_finish, return_recv_hook)
        self.check_experts(call, num_experts)
        self.check_tensor(call, "x", x, (torch.bfloat16,), None, None)
        num_tokens = x.shape[0]
        self.check_tensor(call, "topk_idx", topk_idx, INDEX_DTYPES, num_tokens, None)
        if num_tokens > max_tokens:
            self.fail(f"{call}: {num_tokens} tokens, but num_max_dispatch_tokens_per_rank={max_tokens}")
        if topk_weights is not None:
            self.check_tensor(call, "topk_weights", topk_weights, (torch.float32,), num_tokens, topk_idx.shape[1])
        if recv_stats is not None:
            per_rank = num_experts // self._num_ranks
            self.check_tensor(call, "cumulative_local_expert_recv_stats", recv_stats, (torch.int32,), per_rank)
        if wait_stats is not None:
            self.check_tensor(call, "dispatch_wait_recv_cost_stats", wait_stats, (torch.int64,), self._num_ranks)
        self._check_scale_format(x.shape[1], *formats)
        self._check_aligned(call, "x", x)
        self._good_dispatch = looks
        return False

    def _check_aligned(self, call: str, name: str, value: Tensor) -> None:
        if value.data_ptr() % 16:
            self.fail(not_aligned(f"{call}: {name} begins", value))

    def _check_async_or_hook(self, call: str, async_finish: bool, return_recv_hook: bool) -> None:
        if async_finish and return_recv_hook:
            self.fail(f"{call}: async_finish and return_recv_hook exclude each other; a hook is called when it suits")

    def _check_scale_format(self, hidden: int, use_fp8: bool, round_scale: bool, use_ue8m0: bool) -> None:
        call = "low_latency_dispatch"
        if hidden % 128 or (use_ue8m0 and hidden % 512):
            multiple = "512, for packed exponents" if use_ue8m0 else "128"
            self.fail(f"{call}: hidden={hidden} is not a multiple of {multiple}")
        if use_ue8m0 and not (use_fp8 and round_scale):
            self.fail(f"{call}: use_ue8m0 needs use_fp8=True and round_scale=True")

    def check_combine(
        self,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        out: Tensor | None,
        wait_stats: Tensor | None,
        num_tokens: int,
        block: tuple[int, int, int],
        top_k: int,
        async_finish: bool,
        return_recv_hook: bool,
    ) -> None:
        """num_tokens, block (L, R * M, H), top_k: of the handle's dispatch."""
        asked = num_tokens, block, top_k, async_finish, return_recv_hook
        unaligned = x.data_ptr() % 16, out is not None and out.data_ptr() % 16
        of_x = x.shape, x.dtype, x.get_device(), x.is_contiguous()
        of_idx = topk_idx.shape, topk_idx.dtype, topk_idx.get_device(), topk_idx.is_contiguous()
        of_weights = topk_weights.shape, topk_weights.dtype, topk_weights.get_device(), topk_weights.is_contiguous()
        looks = asked, unaligned, of_x, of_idx, of_weights, facts(out), facts(wait_stats)
        if looks == self._good_combine:
            return
        call = "low_latency_combine"
        self._check_async_or_hook(call, async_finish, return_recv_hook)
        if topk_weights.shape[0] != num_tokens:
            self.fail(f"{call}: {topk_weights.shape[0]} tokens, but the handle is of a dispatch of {num_tokens}")
        self.check_tensor(call, "x", x, (torch.bfloat16,), *block)
        self.check_tensor(call, "topk_weights", topk_weights, (torch.float32,), None, top_k)
        self.check_tensor(call, "topk_idx", topk_idx, INDEX_DTYPES, num_tokens, top_k)
        if wait_stats is not None:
            self.check_tensor(call, "combine_wait_recv_cost_stats", wait_stats, (torch.int64,), self._num_ranks)
        if out is not None:
            self.check_tensor(call, "out", out, (torch.bfloat16,), num_tokens, block[2])
            self._check_aligned(call, "out", out)
        self._check_aligned(call, "x", x)
        self._good_combine = looks

    def check_limits(self, *, max_tokens: int, top_k: int, num_experts: int) -> None:
        """ValueError beyond the limits of the low-latency kernels."""
        for what, value, most in (
            ("ranks", self._num_ranks, MAX_RANKS),
            ("top-k", top_k, MAX_TOP_K),
            ("experts per rank", num_experts // self._num_ranks, MAX_LOCAL_SLOTS),
            ("num_max_dispatch_tokens_per_rank * top-k", max_tokens * top_k, MAX_ENTRIES),
        ):
            if not 1 <= value <= most:
                self.fail(f"low_latency_dispatch: {what} = {value}: must be in 1..{most}")

    def make_signal(
        self,
        call: str,
        counter: Tensor | None,
        count: Tensor | None,
        block: tuple[int, int, int],
        block_m: int,
        threshold: int,
        num_sms: int,
    ) -> Signal:
        """The signal of a single-batch overlap. count: packed_recv_count; block: (L, R * M, H)."""
        if counter is None or block_m < 1 or threshold < 1:
            self.fail(
                f"{call}: overlap=True needs comp_signal, block_m >= 1 and threshold >= 1; they are "
                f"{'None' if counter is None else tuple(counter.shape)}, {block_m}, {threshold}"
            )
        num_local, tiles = block[0], -(-block[1] // block_m)
        if count is not None:
            self.check_tensor(call, "packed_recv_count", count, (torch.int32,), num_local)
        self.check_tensor(call, "comp_signal", counter, (torch.int32, torch.uint32), num_local * tiles)
        if not 1 <= num_sms <= MAX_SIGNAL_SMS:
            self.fail(f"{call}: num_sms={num_sms}: must be in 1..{MAX_SIGNAL_SMS}")
        return Signal(counter, threshold, block_m, tiles, num_sms)

    def check_streams(self, call: str, has_event: bool, async_finish: bool, allocate_on_comm_stream: bool) -> None:
        if allocate_on_comm_stream and not (has_event and async_finish):
            self.fail(f"{call}: allocate_on_comm_stream=True needs previous_event and async_finish=True")

    def fail(self, message: str) -> NoReturn:
        raise ValueError(f"{self._where} {message}")
