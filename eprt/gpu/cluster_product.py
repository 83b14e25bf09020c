"""Products of a few e4m3 rows with block-scaled e4m3 weights on Hopper (csrc/cuda/cluster_product.cu).

The thread blocks of a cluster split K and add their parts through shared memory, in one kernel. Knows how to build and
launch that kernel; which tiling suits a shape is known to eprt/ops/tuning.py.
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
PADDED_TO = 16  # the number of rows of x in memory is a multiple of this
TOKENS = (16, 32, 64, 128)  # there is a kernel for up to so many rows
_log = logging.getLogger(__name__)
_BLOCK, _WARPGROUP, _WARP = 128, 128, 32


@dataclass(frozen=True)
class ClusterTiling:
    """How the kernel divides a product."""

    warpgroups: int  # that multiply, in a thread block
    blocks: int  # of 64 weight rows, per warpgroup
    splits: int  # thread blocks that share the K of one tile
    stages: int  # steps of 128 columns whose loads are in flight

    @property
    def tile(self) -> int:
        """Weight rows of a tile."""
        return 64 * self.warpgroups * self.blocks

    def shared_bytes(self, tokens: int) -> int:
        steps, sums = self.stages * (self.tile + tokens) * _BLOCK, tokens * (self.tile + 4) * 4
        return 1024 + max(steps, sums) + self.stages * (tokens * 4 + 16)

    def threads(self, tokens: int) -> int:
        """Per thread block: the kernel's kThreads."""
        unequal = tokens == 128 and self.warpgroups * self.blocks > 2
        return self.warpgroups * _WARPGROUP + (_WARPGROUP if unequal else _WARP)


class ClusterProductParams(ctypes.Structure):
    """The kernel's argument; csrc/cuda/cluster_product.cu explains the fields."""

    _fields_ = (
        ("w", TensorMap),
        ("x", TensorMap),
        ("w_scale", ctypes.c_void_p),
        ("x_scale", ctypes.c_void_p),
        ("y", ctypes.c_void_p),
        ("rows", ctypes.c_int32),
        ("scale_rows", ctypes.c_int32),
        ("n", ctypes.c_int32),
        ("matrix_n", ctypes.c_int32),
        ("steps", ctypes.c_int32),
        ("_", ctypes.c_uint8 * 20),  # pads the struct to a multiple of a tensor map's alignment
    )


def source(tokens: int, tiling: ClusterTiling) -> KernelSource:
    shape = {"WARPGROUPS": tiling.warpgroups, "BLOCKS": tiling.blocks, "SPLITS": tiling.splits, "STAGES": tiling.stages}
    return KernelSource("cluster_product", ARCH, (("TOKENS", tokens), *shape.items()))


def tokens_of(rows: int) -> int:
    """TOKENS of the kernel for so many rows."""
    return next(tokens for tokens in TOKENS if tokens >= rows)


@functools.cache
def is_built(device: int, tokens: int, tiling: ClusterTiling) -> bool:
    """Whether this GPU can run the kernel: it needs Hopper, cuda-bindings, and NVRTC or a filled kernel cache."""
    try:
        return torch.cuda.get_device_capability(device) == (9, 0) and _launch(device, tokens, tiling) is not None
    except ImportError as error:
        _log.info("fp8 products of up to %d rows use a slower kernel: %s", tokens, error)
        return False


def cluster_product(
    x_PK: Tensor, scale_PG: Tensor, w_NK: Tensor, w_scale: Tensor, rows: int, tiling: ClusterTiling
) -> Tensor:
    """bfloat16 [rows, N]. All tensors are contiguous; K is a multiple of 128, N of 4.

    Of a stack [B, N, K], with N a multiple of the tile: [rows, B * N], each matrix's product with the next K columns.

    x_PK: e4m3, P = rows rounded up to PADDED_TO, at most 128.
    scale_PG: fp32 scales of x_PK, stored column by column.
    w_NK, w_scale: the preceding kernel on this stream must not write them: this one starts before that one has ended.
    """
    padded, (matrix_n, k), n = x_PK.shape[0], w_NK.shape[-2:], w_NK.shape[:-1].numel()
    if x_PK.shape[1] != n // matrix_n * k or (n > matrix_n and matrix_n % tiling.tile):
        raise ValueError(f"rows of {x_PK.shape[1]}, weight {tuple(w_NK.shape)}, tiles of {tiling.tile}: do not fit")
    y_MN = torch.empty(rows, n, dtype=torch.bfloat16, device=x_PK.device)
    if rows == 0:
        return y_MN
    tokens = tokens_of(padded)
    launch = _launch(x_PK.device.index, tokens, tiling)
    p = launch.params
    p.w = byte_matrix(w_NK.data_ptr(), n, k, tiling.tile)
    p.x = byte_matrix(x_PK.data_ptr(), padded, x_PK.shape[1], tokens)
    p.w_scale, p.x_scale, p.y = w_scale.data_ptr(), scale_PG.data_ptr(), y_MN.data_ptr()
    p.rows, p.scale_rows, p.n, p.matrix_n, p.steps = rows, padded, n, matrix_n, k // _BLOCK
    launch(-(-n // tiling.tile) * tiling.splits, torch.cuda.current_stream().cuda_stream)
    return y_MN


@functools.cache
def _launch(device: int, tokens: int, tiling: ClusterTiling) -> Launch:
    kernel = Kernel(
        source(tokens, tiling), "eprt::cluster_product", tiling.threads(tokens), tiling.shared_bytes(tokens)
    )
    return Launch(kernel, ClusterProductParams(), starts_early=True)
