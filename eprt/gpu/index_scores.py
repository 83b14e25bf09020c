"""Scores of the indexer over an fp8 cache of keys on Hopper: csrc/cuda/index_scores.cu.

Knows how to build and launch the kernel and what it takes; when it is used is known to eprt/ops/cuda.
"""

import ctypes
import functools

import torch
from torch import Tensor

from eprt.gpu.jit import KernelSource
from eprt.gpu.launch import Kernel, Launch
from eprt.gpu.tensor_map import TensorMap, byte_matrix

ARCH = "sm_90a"
HEADS, SIZE, KEY_BYTES = 64, 128, 132
KEYS = 64  # positions of a block
PAGE_MULTIPLE = 16
QUERIES = (4, 16)  # rows of a thread block
_STAGES, _THREADS = 6, 3 * 128 + 32
_BLOCKS = {4: 32, 16: 64}  # of keys, of a thread block, by its queries


class IndexScoresParams(ctypes.Structure):
    """The argument of csrc/cuda/index_scores.cu."""

    _fields_ = (
        ("query", TensorMap),
        ("weight", ctypes.c_void_p),
        ("keys", ctypes.c_void_p),
        ("page_table", ctypes.c_void_p),
        ("request", ctypes.c_void_p),
        ("length", ctypes.c_void_p),
        ("score", ctypes.c_void_p),
        ("stride", ctypes.c_int64),
        ("key_page", ctypes.c_int64),
        ("rows", ctypes.c_int32),
        ("table_width", ctypes.c_int32),
        ("page_size", ctypes.c_int32),
        ("piece", ctypes.c_int32),
        ("blocks", ctypes.c_int32),
        ("splits", ctypes.c_int32),
        ("_", ctypes.c_uint8 * 40),  # pads the struct to a multiple of a tensor map's alignment
    )


def source(queries: int) -> KernelSource:
    return KernelSource("index_scores", ARCH, (("QUERIES", queries),))


def shared_bytes(queries: int) -> int:
    """What aligns it; queries, stages of keys, weights and lengths, barriers."""
    return 1024 + queries * (HEADS * SIZE + 4 * HEADS + 4) + _STAGES * KEYS * KEY_BYTES + 256


def queries_of(rows: int, requests: int) -> int:
    """Few where few rows have the same keys."""
    return QUERIES[rows > 4 * requests]


def reads(key_pages: Tensor) -> bool:
    """Pages may lie apart, by multiples of 16 bytes; the keys of each lie side by side."""
    aligned = key_pages.stride(0) % 16 == 0 and key_pages.data_ptr() % 16 == 0
    return aligned and key_pages.stride()[1:] == (KEY_BYTES, 1)


def load(device: int) -> None:
    """Loads all kernels. ImportError when they can be neither compiled nor found."""
    for queries in QUERIES:
        _scores(device, queries)


def index_scores(
    score_XS: Tensor,
    query_XND: Tensor,
    weight_XN: Tensor,
    key_pages: Tensor,
    page_table_BP: Tensor,
    request_X: Tensor,
    length_X: Tensor,
) -> None:
    """Fills the first length_X scores of each row of score_XS.

    query_XND: uint8 [X, HEADS, SIZE], e4m3, contiguous. weight_XN: fp32, contiguous, times the queries' scales.
    key_pages: uint8 [pages, page_size, KEY_BYTES], as reads() says; page_size a multiple of PAGE_MULTIPLE.
    page_table_BP, request_X, length_X: int32, contiguous in their last dimension; equal requests lie together.
    """
    rows, page_size, most_seen = len(query_XND), key_pages.shape[1], score_XS.shape[1]
    if rows == 0 or most_seen == 0:
        return
    queries = queries_of(rows, page_table_BP.shape[0])
    blocks, piece = _BLOCKS[queries], next(size for size in (64, 32, 16) if page_size % size == 0)
    splits = -(-most_seen // (blocks * KEYS))
    launch = _scores(query_XND.device.index, queries)
    p = launch.params
    p.query = byte_matrix(query_XND.data_ptr(), rows * HEADS, SIZE, HEADS)
    p.weight, p.keys, p.score = weight_XN.data_ptr(), key_pages.data_ptr(), score_XS.data_ptr()
    p.key_page = key_pages.stride(0)
    p.page_table, p.table_width = page_table_BP.data_ptr(), page_table_BP.stride(0)
    p.request, p.length, p.stride, p.rows = request_X.data_ptr(), length_X.data_ptr(), score_XS.stride(0), rows
    p.page_size, p.piece, p.blocks, p.splits = page_size, piece, blocks, splits
    launch(-(-rows // queries) * splits, torch.cuda.current_stream().cuda_stream)


@functools.cache
def _scores(device: int, queries: int) -> Launch:
    kernel = Kernel(source(queries), "eprt::index_scores", _THREADS, shared_bytes(queries))
    return Launch(kernel, IndexScoresParams())
