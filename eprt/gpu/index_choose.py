"""The choice of the indexer on Hopper (csrc/cuda/index_choose.cu): the best scores of each row, in one launch.

Knows how to build and launch the kernel and what it takes; when it is used is known to eprt/ops/cuda.
"""

import ctypes
import functools

import torch
from torch import Tensor

from eprt.gpu.jit import KernelSource
from eprt.gpu.launch import Kernel, Launch

ARCH = "sm_90a"
ROOM = 8192  # scores that may reach the guess; top_k is at most this
SIZES = (8192, 32768)  # of 32 positions that a row may have
CTAS = (8, 4, 2, 1)  # thread blocks for a row
_DIGITS = 4096


class IndexChooseParams(ctypes.Structure):
    """The argument of csrc/cuda/index_choose.cu."""

    _fields_ = (
        ("score", ctypes.c_void_p),
        ("page_table", ctypes.c_void_p),
        ("request", ctypes.c_void_p),
        ("length", ctypes.c_void_p),
        ("slot", ctypes.c_void_p),
        ("stride", ctypes.c_int64),
        ("table_width", ctypes.c_int32),
        ("page_size", ctypes.c_int32),
        ("top_k", ctypes.c_int32),
    )


def threads_of(ctas: int) -> int:
    """Of a thread block: where each has a row by itself, two of them share a multiprocessor."""
    return 512 if ctas == 1 else 1024


def source(ctas: int, words: int) -> KernelSource:
    return KernelSource("index_choose", ARCH, (("CTAS", ctas), ("THREADS", threads_of(ctas)), ("WORDS", words)))


def shared_bytes(ctas: int, words: int) -> int:
    """What aligns it; keys and positions, bits, counts, sums of threads and of warps, and what is small."""
    threads = threads_of(ctas)
    return 1024 + 8 * ROOM + 4 * (words + _DIGITS + threads + threads // 32) + 64


def words_of(most_seen: int) -> int | None:
    """The smallest size that is enough for so many positions; None where none is."""
    return next((words for words in SIZES if most_seen <= 32 * words), None)


def ctas_of(rows: int, processors: int) -> int:
    """As many thread blocks for a row as run at once."""
    return next((ctas for ctas in CTAS if rows * ctas <= processors), 1)


def load(device: int) -> None:
    """Loads all kernels. ImportError when they can be neither compiled nor found."""
    for ctas in CTAS:
        for words in SIZES:
            _choose(device, ctas, words)


def choose(
    slot_XK: Tensor, score_XS: Tensor, page_table_BP: Tensor, request_X: Tensor, length_X: Tensor, page_size: int
) -> None:
    """Fills slot_XK: int32, contiguous; top_k is at most ROOM.

    score_XS: fp32, 16-byte aligned, rows a multiple of 4 apart, as wide as words_of allows; only the first length_X of
        a row are scores.
    page_table_BP, request_X, length_X: int32, contiguous in their last dimension.
    """
    rows, device = slot_XK.shape[0], slot_XK.device
    if rows == 0:
        return
    words = words_of(score_XS.shape[1])
    assert words is not None and slot_XK.shape[1] <= ROOM and score_XS.stride(0) % 4 == 0
    ctas = ctas_of(rows, torch.cuda.get_device_properties(device).multi_processor_count)
    launch = _choose(device.index, ctas, words)
    p = launch.params
    p.score, p.stride, p.slot, p.top_k = score_XS.data_ptr(), score_XS.stride(0), slot_XK.data_ptr(), slot_XK.shape[1]
    p.page_table, p.table_width, p.page_size = page_table_BP.data_ptr(), page_table_BP.stride(0), page_size
    p.request, p.length = request_X.data_ptr(), length_X.data_ptr()
    launch(rows * ctas, torch.cuda.current_stream(device).cuda_stream)


@functools.cache
def _choose(device: int, ctas: int, words: int) -> Launch:
    kernel = Kernel(source(ctas, words), "eprt::index_choose", threads_of(ctas), shared_bytes(ctas, words))
    return Launch(kernel, IndexChooseParams())
