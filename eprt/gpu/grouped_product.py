"""Products of bfloat16 rows, grouped by expert, with the experts' matrices on Hopper (csrc/cuda/grouped_product.cu).

Knows how to build and launch that kernel; which products it is for is known to eprt/ops/cuda/grouped_gemm.py.
"""

import ctypes
import functools
import logging
import math

import torch
from torch import Tensor

from eprt.gpu.jit import KernelSource
from eprt.gpu.launch import Kernel, Launch
from eprt.gpu.tensor_map import TensorMap, byte_matrix

ARCH = "sm_90a"
MOST_EXPERTS = 1024
_log = logging.getLogger(__name__)
_THREADS, _STAGES = 384, 4
_HALF, _BOX, _MOST_ROWS, _STEP = 128, 16, 176, 64  # the kernel's kHalf, kBox, kMostRows, kStep


class GroupedProductParams(ctypes.Structure):
    """The kernel's argument; csrc/cuda/grouped_product.cu explains the fields."""

    _fields_ = (
        ("w", TensorMap),
        ("x", TensorMap),
        ("count", ctypes.c_void_p),
        ("matrix", ctypes.c_void_p),
        ("y", ctypes.c_void_p),
        ("num_experts", ctypes.c_int32),
        ("n", ctypes.c_int32),
        ("steps", ctypes.c_int32),
        ("limit", ctypes.c_float),
        ("_", ctypes.c_uint8 * 24),  # pads the struct to a multiple of a tensor map's alignment
    )


def source(gated: bool) -> KernelSource:
    return KernelSource("grouped_product", ARCH, (("GATED", int(gated)), ("STAGES", _STAGES)))


def shared_bytes() -> int:
    stage = (2 * _HALF + _MOST_ROWS) * 2 * _STEP
    return 1024 + _STAGES * (stage + 16) + 2 * 4 * (MOST_EXPERTS + 1)


@functools.cache
def is_built(device: torch.device, gated: bool) -> bool:
    """Whether this device can run the kernel: it needs Hopper, cuda-bindings, and NVRTC or a filled kernel cache."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        return False
    try:
        return _launch(device.index, gated) is not None
    except ImportError as error:
        _log.info("bfloat16 experts use a slower kernel: %s", error)
        return False


def can_multiply(x_RK: Tensor, w: Tensor, num_experts: int, gated: bool) -> bool:
    """Whether the kernel is made for these operands: as grouped_product."""
    (n, k), contiguous = w.shape[-2:], x_RK.is_contiguous() and w.is_contiguous()
    aligned = k % 8 == 0 and n % (8 if gated else 4) == 0 and (x_RK.data_ptr() | w.data_ptr()) % 16 == 0
    return contiguous and aligned and num_experts <= MOST_EXPERTS


def grouped_product(
    x_RK: Tensor,
    w: Tensor,
    recv_count_E: Tensor,
    matrix_E: Tensor | None,
    y_RN: Tensor,
    gated: bool,
    num_sms: int,
    limit: float | None = None,
) -> None:
    """Stores x W_e^T, or silu(gate) * up if gated, both cut to the limit, in y_RN. All tensors are contiguous, x_RK, w
    and y_RN bfloat16.

    w: [E, N, K], or [E, 2N, K] if gated. K is a multiple of 8, N of 4.
    num_sms: SMs to compute on.
    """
    (rows, k), n, num_experts = x_RK.shape, y_RN.shape[1], recv_count_E.shape[0]
    launch = _launch(x_RK.device.index, gated)
    p = launch.params
    p.w = byte_matrix(w.data_ptr(), w.numel() // k, 2 * k, _HALF)
    p.x = byte_matrix(x_RK.data_ptr(), rows, 2 * k, _BOX)
    p.count, p.matrix = recv_count_E.data_ptr(), None if matrix_E is None else matrix_E.data_ptr()
    p.y, p.num_experts, p.n, p.steps = y_RN.data_ptr(), num_experts, n, -(-k // _STEP)
    p.limit = math.inf if limit is None else limit
    pairs = -(-n // (_HALF if gated else 2 * _HALF)) // 2 + 1
    clusters = min(max(1, num_sms // 2), (-(-rows // _MOST_ROWS) + num_experts) * pairs)
    launch(2 * clusters, torch.cuda.current_stream().cuda_stream)


@functools.cache
def _launch(device: int, gated: bool) -> Launch:
    kernel = Kernel(source(gated), "eprt::grouped_product", _THREADS, shared_bytes())
    return Launch(kernel, GroupedProductParams())
