"""DispatchLayout: the kernel behind get_dispatch_layout (csrc/cuda/dispatch_layout.cu). Knows nothing of streams."""

import torch
from torch import Tensor

from eprt.ep.nvlink.structs import struct
from eprt.gpu.device import this_arch
from eprt.gpu.jit import KernelSource
from eprt.gpu.launch import Kernel, Launch
from eprt.gpu.shapes import shape_only

_THREADS, _MOST_BLOCKS = 256, 32  # the first: kLayoutThreads of the kernel

_LayoutParams = struct(
    "LayoutParams",
    "pointer topk_idx rank_tokens expert_tokens in_rank totals",
    "int32 num_tokens top_k num_experts idx_bytes",
)


class DispatchLayout:
    """Counts a batch's tokens for each rank and expert. Calls must reach the GPU one after another, on any streams."""

    def __init__(self, num_ranks: int, num_experts: int):
        self._num_ranks = num_ranks
        self._device = torch.cuda.current_device()
        columns = num_experts + num_ranks
        kernel = Kernel(source(num_ranks, this_arch()), "eprt::layout", _THREADS, columns * 4)
        self._totals = torch.zeros(columns + 1, dtype=torch.int32, device="cuda")
        self._launch = Launch(kernel, _LayoutParams(num_experts=num_experts, totals=self._totals.data_ptr()))
        self._per_rank = shape_only(num_ranks, dtype=torch.int32)
        self._per_expert = shape_only(num_experts, dtype=torch.int32)
        self._in_rank = shape_only(0, num_ranks, dtype=torch.bool)
        torch.cuda.synchronize()  # the first call may come on another stream

    def __call__(self, topk_idx: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(tokens for each rank, int32 [R]; tokens for each expert, int32 [E]; is_token_in_rank, bool [T, R]).

        A token counts once for a rank. topk_idx: int32 or int64 [T, K].
        """
        num_tokens, top_k = topk_idx.shape
        if self._in_rank.shape[0] != num_tokens:
            self._in_rank = shape_only(num_tokens, self._num_ranks, dtype=torch.bool)
        # Three tensors cost the host less than one tensor and views of it.
        per_rank, per_expert = torch.empty_like(self._per_rank), torch.empty_like(self._per_expert)
        in_rank = torch.empty_like(self._in_rank)
        p = self._launch.params
        p.topk_idx, p.in_rank = topk_idx.data_ptr(), in_rank.data_ptr()
        p.rank_tokens, p.expert_tokens = per_rank.data_ptr(), per_expert.data_ptr()
        p.num_tokens, p.top_k, p.idx_bytes = num_tokens, top_k, topk_idx.element_size()
        blocks = min(_MOST_BLOCKS, -(-num_tokens // _THREADS)) or 1
        self._launch(blocks, torch._C._cuda_getCurrentRawStream(self._device))
        return per_rank, per_expert, in_rank

    def close(self) -> None:
        self._launch.kernel.close()


def source(num_ranks: int, arch: str = "sm_90a") -> KernelSource:
    return KernelSource("dispatch_layout", arch, (("NUM_RANKS", num_ranks),))
