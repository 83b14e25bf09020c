"""Layout: the kernel behind get_dispatch_layout (csrc/cuda/layout.cu)."""

import ctypes

import torch
from torch import Tensor

from eprt.ep.nvlink_layout import fields_of_type, struct
from eprt.ep.nvlink_low_latency import this_arch
from eprt.gpu.jit import KernelSource
from eprt.gpu.launch import Kernel, Launch

_THREADS, _MAX_BLOCKS = 256, 64

_LayoutParams = struct(
    "LayoutParams",
    *fields_of_type(ctypes.c_void_p, "topk_idx count in_rank"),
    *fields_of_type(ctypes.c_int32, "num_tokens top_k num_experts idx_bytes"),
)


class Layout:
    def __init__(self, num_ranks: int, num_experts: int):
        self._num_ranks, self._num_experts = num_ranks, num_experts
        self._device = torch.cuda.current_device()
        kernel = Kernel(source(num_ranks, this_arch()), "eprt::layout", _THREADS, (num_ranks + num_experts) * 4)
        self._launch = Launch(kernel, _LayoutParams(num_experts=num_experts))

    def __call__(self, topk_idx: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """topk_idx int [T, K] -> tokens for each rank int32 [R], for each expert int32 [E], is_token_in_rank bool [T,
        R]; a token counts once for a rank."""
        num_tokens, R = topk_idx.shape[0], self._num_ranks
        count = torch.zeros(R + self._num_experts, dtype=torch.int32, device="cuda")
        in_rank = torch.empty(num_tokens, R, dtype=torch.bool, device="cuda")
        p = self._launch.params
        p.topk_idx, p.count, p.in_rank = topk_idx.data_ptr(), count.data_ptr(), in_rank.data_ptr()
        p.num_tokens, p.top_k, p.idx_bytes = num_tokens, topk_idx.shape[1], topk_idx.element_size()
        blocks = min(max(-(-num_tokens // _THREADS), 1), _MAX_BLOCKS)
        self._launch(blocks, torch._C._cuda_getCurrentRawStream(self._device))
        return count[:R], count[R:], in_rank

    def close(self) -> None:
        self._launch.kernel.close()


def source(num_ranks: int, arch: str = "sm_90a") -> KernelSource:
    return KernelSource("layout", arch, (("NUM_RANKS", num_ranks),))
