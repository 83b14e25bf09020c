"""Attention of prompts in expanded form on Hopper (csrc/cuda/prompt_attention.cu).

Knows how to build and launch the kernel and what it takes; when it is used is known to eprt/ops/cuda.
"""

import ctypes
import functools

import torch
from torch import Tensor

from eprt.gpu.jit import KernelSource
from eprt.gpu.launch import Kernel, Launch
from eprt.gpu.tensor_map import BOX_BYTES, TensorMap, partial_tiles, strided_tiles

ARCH = "sm_90a"
NOPE, ROPE, VALUE = 128, 64, 128
ROWS, KEYS = 128, 128  # of a tile: new tokens of a request; of a block: positions
_THREADS, _STAGES = 384, 2
_SHARED_BYTES = 1024 + (ROWS * (NOPE + ROPE) + _STAGES * KEYS * (NOPE + ROPE + VALUE)) * 2 + 256
_HEAD_TILES = (NOPE + VALUE) * 2 // BOX_BYTES  # of keys and values
_KEPT_BYTES = 24 << 20  # of keys and values that all thread blocks read at about the same time: half of the L2 cache


class PromptParams(ctypes.Structure):
    """The argument of csrc/cuda/prompt_attention.cu, which explains the fields."""

    _fields_ = (
        ("q_nope", TensorMap),
        ("q_rope", TensorMap),
        ("kv", TensorMap),
        ("rope", TensorMap),
        ("query_start", ctypes.c_void_p),
        ("length", ctypes.c_void_p),
        ("next", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("out_stride", ctypes.c_int64),
        ("requests", ctypes.c_int32),
        ("heads", ctypes.c_int32),
        ("heads_together", ctypes.c_int32),
        ("nope_head_tiles", ctypes.c_int32),
        ("rope_head_tiles", ctypes.c_int32),
        ("scale", ctypes.c_float),
    )


def source(defines: tuple[tuple[str, str | int], ...] = ()) -> KernelSource:
    return KernelSource("prompt_attention", ARCH, defines)


def load(device: int) -> None:
    """Loads the kernel. ImportError when it can be neither compiled nor found."""
    _launch(device)


def prompt_attention(
    q_nope_TNC: Tensor,
    q_rope_TNR: Tensor,
    kv_SNE: Tensor,
    rope_SR: Tensor,
    length_B: Tensor,
    query_start_B1: Tensor,
    softmax_scale: float,
    out_TNV: Tensor,
    heads_together: int | None = None,
) -> None:
    """Writes out_TNV. All bfloat16, the last dimension contiguous, strides multiples of 64 values.

    kv_SNE: keys and values of all requests' positions, one request after the other, [S, N, NOPE + VALUE]; contiguous
        in its last two dimensions.
    rope_SR: rotated keys of the same positions.
    length_B, query_start_B1: int32, contiguous.
    out_TNV: contiguous in its last two dimensions.
    heads_together: heads that are computed at the same time, by default as many as L2 holds.
    """
    (tokens, heads, _), positions, device = q_nope_TNC.shape, kv_SNE.shape[0], q_nope_TNC.device
    if tokens == 0:
        return
    next_tile = torch.zeros(1, dtype=torch.int32, device=device)
    launch = _launch(device.index)
    p = launch.params
    p.q_nope, p.q_rope = _query_map(q_nope_TNC, NOPE), _query_map(q_rope_TNR, ROPE)
    kv_tiles = heads * _HEAD_TILES
    p.kv = partial_tiles(kv_SNE.data_ptr(), positions, kv_SNE.stride(0) * 2, kv_tiles, KEYS, 2)
    p.rope = partial_tiles(rope_SR.data_ptr(), positions, rope_SR.stride(0) * 2, 1, KEYS, 1)
    p.query_start, p.length = query_start_B1.data_ptr(), length_B.data_ptr()
    p.next, p.out, p.out_stride = next_tile.data_ptr(), out_TNV.data_ptr(), out_TNV.stride(0)
    p.requests, p.heads, p.scale = length_B.shape[0], heads, softmax_scale
    p.nope_head_tiles, p.rope_head_tiles = (q.stride(1) * 2 // BOX_BYTES for q in (q_nope_TNC, q_rope_TNR))
    p.heads_together = heads_together or max(1, min(heads, _KEPT_BYTES // (positions * (NOPE + VALUE) * 2)))
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    launch(min(multiprocessors, heads * (tokens // ROWS + p.requests)), torch.cuda.current_stream(device).cuda_stream)


def _query_map(q_TNC: Tensor, size: int) -> TensorMap:  # type: ignore[valid-type]
    tokens, heads, _ = q_TNC.shape
    head_tiles, box_tiles = q_TNC.stride(1) * 2 // BOX_BYTES, size * 2 // BOX_BYTES
    tiles = (heads - 1) * head_tiles + box_tiles
    return strided_tiles(q_TNC.data_ptr(), tokens, q_TNC.stride(0) * 2, tiles, ROWS, box_tiles)


@functools.cache
def _launch(device: int) -> Launch:
    return Launch(Kernel(source(), "eprt::prompt_attention", _THREADS, _SHARED_BYTES), PromptParams())
