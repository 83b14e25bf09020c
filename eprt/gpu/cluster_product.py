"""Products of few e4m3 rows with block-scaled e4m3 weights on Hopper (csrc/cuda/cluster_product.cu).

A cluster of thread blocks splits K and adds up over shared memory, in one kernel.
"""

import ctypes
import functools
import logging
from dataclasses import dataclass

import torch
from torch import Tensor

from eprt.gpu.jit import KernelSource
from eprt.gpu.launch import Kernel, Launch
from eprt.gpu.tensor_map import TensorMap, byte_matrix

ARCH = "sm_90a"
PADDED_TO = 16  # rows
TOKENS = (16, 32, 64, 128)  # most rows that kernels are made for
_log = logging.getLogger(__name__)
_BLOCK, _WARPGROUP, _WARP = 128, 128, 32


@dataclass(frozen=True)
class ClusterTiling:
    """A tile is 64 * warpgroups * blocks rows of weights; so many thread blocks share its K, each with loads so many
    steps of 128 columns ahead."""

    warpgroups: int
    blocks: int
    splits: int
    stages: int

    @property
    def tile(self) -> int:
        return 64 * self.warpgroups * self.blocks

    def shared_bytes(self, tokens: int) -> int:
        steps, sums = self.stages * (self.tile + tokens) * _BLOCK, tokens * (self.tile + 4) * 4
        return 1024 + max(steps, sums) + self.stages * (tokens * 4 + 16)

    def threads(self, tokens: int) -> int:
        """kThreads of the kernel."""
        unequal = tokens == 128 and self.warpgroups * self.blocks > 2
        return self.warpgroups * _WARPGROUP + (_WARPGROUP if unequal else _WARP)


class ClusterProductParams(ctypes.Structure):
    _fields_ = (
        ("w", TensorMap), ("x", TensorMap), ("w_scale", ctypes.c_void_p), ("x_scale", ctypes.c_void_p),
        ("y", ctypes.c_void_p), ("rows", ctypes.c_int32), ("scale_rows", ctypes.c_int32), ("n", ctypes.c_int32),
        ("steps", ctypes.c_int32), ("_", ctypes.c_uint8 * 24),  # to a multiple of a tensor map's alignment
    )  # fmt: skip


def source(tokens: int, tiling: ClusterTiling) -> KernelSource:
    shape = {"WARPGROUPS": tiling.warpgroups, "BLOCKS": tiling.blocks, "SPLITS": tiling.splits, "STAGES": tiling.stages}
    return KernelSource("cluster_product", ARCH, (("TOKENS", tokens), *shape.items()))


def tokens_of(rows: int) -> int:
    return next(tokens for tokens in TOKENS if tokens >= rows)


@functools.cache
def is_built(device: int, tokens: int, tiling: ClusterTiling) -> bool:
    """Whether there is such a kernel for this GPU: it needs cuda-bindings, and NVRTC or a filled cache."""
    try:
        return torch.cuda.get_device_capability(device) == (9, 0) and _launch(device, tokens, tiling) is not None
    except ImportError as error:
        _log.info("fp8 products of %d rows take a slower kernel: %s", tokens, error)
        return False


def cluster_product(
    x_PK: Tensor, scale_PG: Tensor, w_NK: Tensor, w_scale: Tensor, rows: int, tiling: ClusterTiling
) -> Tensor:
    """bfloat16 [rows, N]. All without gaps; K must be a multiple of 128, N of 4.

    x_PK: e4m3, rows rounded up to PADDED_TO, 128 at most; their scales lie column by column. w_NK, w_scale: nothing
    that the kernel before on this stream writes.
    """
    (padded, k), n = x_PK.shape, w_NK.shape[0]
    y_MN = torch.empty(rows, n, dtype=torch.bfloat16, device=x_PK.device)
    if rows == 0:
        return y_MN
    tokens = tokens_of(padded)
    launch = _launch(x_PK.device.index, tokens, tiling)
    p = launch.params
    p.w, p.x = byte_matrix(w_NK.data_ptr(), n, k, tiling.tile), byte_matrix(x_PK.data_ptr(), padded, k, tokens)
    p.w_scale, p.x_scale, p.y = w_scale.data_ptr(), scale_PG.data_ptr(), y_MN.data_ptr()
    p.rows, p.scale_rows, p.n, p.steps = rows, padded, n, k // _BLOCK
    launch(-(-n // tiling.tile) * tiling.splits, torch.cuda.current_stream().cuda_stream)
    return y_MN


@functools.cache
def _launch(device: int, tokens: int, tiling: ClusterTiling) -> Launch:
    kernel = Kernel(
        source(tokens, tiling), "eprt::cluster_product", tiling.threads(tokens), tiling.shared_bytes(tokens)
    )
    return Launch(kernel, ClusterProductParams(), starts_early=True)
