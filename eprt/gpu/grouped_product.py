"""Products of bfloat16 rows, grouped by expert, with the experts' matrices in bfloat16 or fp4 on Hopper
(csrc/cuda/grouped_product.cu and grouped_fp4.cu).

Knows how to build and launch these kernels; which products they are for is known to eprt/ops/cuda/grouped_bf16.py.
"""

import ctypes
import functools
import logging
import math

import torch
from torch import Tensor

from eprt.gpu.jit import KernelSource
from eprt.gpu.launch import Kernel, Launch
from eprt.gpu.tensor_map import TensorMap, byte_matrix, narrow_matrix

ARCH = "sm_90a"
MOST_EXPERTS = 1024
_log = logging.getLogger(__name__)
_HALF, _BOX, _STEP = 128, 16, 64  # the kernels' kHalf, kBox, kStep
_THREADS, _FP4_THREADS = 384, 512  # kThreads
_MOST_ROWS, _FP4_MOST_ROWS = 176, 160
_STAGES, _FP4_SLOTS = 4, (5, 4, 3)  # kWeightSlots, kRowSlots, kWideSlots
_SCALED_COLUMNS = 256  # whose scales are loaded at once


class GroupedProductParams(ctypes.Structure):
    """The kernels' argument; csrc/cuda/grouped_units.cuh explains the fields."""

    _fields_ = (
        ("w", TensorMap),
        ("x", TensorMap),
        ("count", ctypes.c_void_p),
        ("matrix", ctypes.c_void_p),
        ("y", ctypes.c_void_p),
        ("scale", ctypes.c_void_p),
        ("num_experts", ctypes.c_int32),
        ("n", ctypes.c_int32),
        ("steps", ctypes.c_int32),
        ("limit", ctypes.c_float),
        ("_", ctypes.c_uint8 * 16),  # pads the struct to a multiple of a tensor map's alignment
    )


def source(gated: bool, fp4: bool = False) -> KernelSource:
    if fp4:
        return KernelSource("grouped_fp4", ARCH, (("GATED", int(gated)), ("MOST_ROWS", _FP4_MOST_ROWS)))
    return KernelSource(
        "grouped_product", ARCH, (("GATED", int(gated)), ("MOST_ROWS", _MOST_ROWS), ("STAGES", _STAGES))
    )


def shared_bytes(fp4: bool = False) -> int:
    w_rows, wide_row, starts = 2 * _HALF, 2 * _STEP, 2 * 4 * (MOST_EXPERTS + 1)
    if fp4:
        weights, rows, wide = _FP4_SLOTS
        slots = weights * w_rows * _STEP // 2 + rows * _FP4_MOST_ROWS * wide_row + wide * w_rows * wide_row
        return 1024 + slots + 16 * sum(_FP4_SLOTS) + starts
    return 1024 + _STAGES * ((w_rows + _MOST_ROWS) * wide_row + 16) + starts


@functools.cache
def is_built(device: torch.device, gated: bool, fp4: bool = False) -> bool:
    """Whether this device can run the kernel: it needs Hopper, cuda-bindings, and NVRTC or a filled kernel cache."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        return False
    try:
        return _launch(device.index, gated, fp4) is not None
    except ImportError as error:
        _log.info("%s experts use a slower kernel: %s", "fp4" if fp4 else "bfloat16", error)
        return False


def can_multiply(x_RK: Tensor, w: Tensor, num_experts: int, gated: bool) -> bool:
    """Whether a kernel is made for these operands: as grouped_product."""
    n, k, fp4, contiguous = (
        w.shape[-2],
        x_RK.shape[1],
        w.dtype == torch.uint8,
        x_RK.is_contiguous() and w.is_contiguous(),
    )
    aligned = k % (_SCALED_COLUMNS if fp4 else 8) == 0 and n % (8 if gated else 4) == 0
    return contiguous and aligned and (x_RK.data_ptr() | w.data_ptr()) % 16 == 0 and num_experts <= MOST_EXPERTS


def grouped_product(
    x_RK: Tensor,
    w: Tensor,
    recv_count_E: Tensor,
    matrix_E: Tensor | None,
    y_RN: Tensor,
    gated: bool,
    num_sms: int,
    limit: float | None = None,
    scale: Tensor | None = None,
) -> None:
    """Stores x W_e^T, or silu(gate) * up if gated, both cut to the limit, in y_RN. All tensors are contiguous, x_RK and
    y_RN bfloat16.

    w: bfloat16 [E, N, K], or [E, 2N, K] if gated; K is a multiple of 8, N of 4. Or fp4, with scale: uint8 [E, N, K / 2]
        and [E, N, K / 32]; K is a multiple of 256.
    num_sms: SMs to compute on.
    """
    (rows, k), n, num_experts = x_RK.shape, y_RN.shape[1], recv_count_E.shape[0]
    launch = _launch(x_RK.device.index, gated, scale is not None)
    p = launch.params
    if scale is None:
        p.w, p.scale, most_rows = byte_matrix(w.data_ptr(), w.numel() // k, 2 * k, _HALF), None, _MOST_ROWS
    else:
        assert w.dtype == scale.dtype == torch.uint8 and scale.is_contiguous() and scale.data_ptr() % 8 == 0
        p.w = narrow_matrix(w.data_ptr(), 2 * w.numel() // k, k // 2, _HALF, _STEP // 2)
        p.scale, most_rows = scale.data_ptr(), _FP4_MOST_ROWS
    p.x = byte_matrix(x_RK.data_ptr(), rows, 2 * k, _BOX)
    p.count, p.matrix = recv_count_E.data_ptr(), None if matrix_E is None else matrix_E.data_ptr()
    p.y, p.num_experts, p.n, p.steps = y_RN.data_ptr(), num_experts, n, -(-k // _STEP)
    p.limit = math.inf if limit is None else limit
    pairs = -(-n // (_HALF if gated else 2 * _HALF)) // 2 + 1
    clusters = min(max(1, num_sms // 2), (-(-rows // most_rows) + num_experts) * pairs)
    launch(2 * clusters, torch.cuda.current_stream().cuda_stream)


@functools.cache
def _launch(device: int, gated: bool, fp4: bool) -> Launch:
    name, threads = ("grouped_fp4", _FP4_THREADS) if fp4 else ("grouped_product", _THREADS)
    return Launch(Kernel(source(gated, fp4), f"eprt::{name}", threads, shared_bytes(fp4)), GroupedProductParams())
