"""Latent attention of decodes over an fp8 cache on Hopper: csrc/cuda/mla_quantize.cu, then mla_dense_fp8.cu,
or mla_decode_fp8.cu for chosen tokens (pages of one).

The schedule of a step and the sum of what it cuts are those of mla_decode.py. Knows how to build and launch these
kernels and what they take; when they are used is known to eprt/ops/cuda.
"""

import ctypes
import functools
from itertools import product

import torch
from torch import Tensor

from eprt.gpu.jit import KernelSource
from eprt.gpu.launch import Kernel, Launch
from eprt.gpu.mla_decode import ARCH, KEYS, LATENT, ROWS, Lengths, MlaSchedule, combine_parts, lengths_of
from eprt.gpu.tensor_map import TensorMap, byte_tiles, strided_pieces, strided_tiles

# Of the cache: 512 latents in e4m3, 64 rotated values in bfloat16, the fp32 scale of both, 12 bytes of nothing.
ENTRY_BYTES = 656
TERMS = 1  # e4m3 numbers for a latent of a query
_ROPE_BYTES, _SCALE_BYTES = 128, 16  # of an entry; the scale and what is behind it
_TILES = (LATENT + _ROPE_BYTES) // 128  # of an entry
_QUANTIZE_THREADS = 256
_KERNELS = {False: ("mla_dense_fp8", 512), True: ("mla_decode_fp8", 384)}  # by whether entries are gathered: threads
_STAGES = {1: 4, 2: 3}  # blocks of positions in shared memory, by terms


class MlaQuantizeParams(ctypes.Structure):
    """The argument of csrc/cuda/mla_quantize.cu."""

    _fields_ = (
        ("q", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("scale", ctypes.c_void_p),
        ("rows", ctypes.c_int32),
    )


class MlaDecodeFp8Params(ctypes.Structure):
    """The argument of csrc/cuda/mla_dense_fp8.cu and mla_decode_fp8.cu."""

    _fields_ = (
        ("q", TensorMap),
        ("latent", TensorMap),
        ("rope", TensorMap),
        ("scale", TensorMap),
        ("all", Lengths),
        ("entries", ctypes.c_void_p),
        ("bound", ctypes.c_void_p),
        ("page_table", ctypes.c_void_p),
        ("q_scale", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("partial", ctypes.c_void_p),
        ("log_sum", ctypes.c_void_p),
        ("q_rows", ctypes.c_int32),
        ("table_width", ctypes.c_int32),
        ("page_size", ctypes.c_int32),
        ("box_rows", ctypes.c_int32),
        ("cache_rows", ctypes.c_int32),
        ("softmax_scale", ctypes.c_float),
        ("_", ctypes.c_uint8 * 24),  # pads the struct to a multiple of a tensor map's alignment
    )


def query_bytes(terms: int) -> int:
    """Of a quantised row (token, head)."""
    return terms * LATENT + _ROPE_BYTES


def shared_bytes(terms: int) -> int:
    """What aligns it, queries, stages, weights, and what is small."""
    stage = KEYS * (LATENT + _ROPE_BYTES + _SCALE_BYTES)
    return 1024 + ROWS * query_bytes(terms) + _STAGES[terms] * stage + 2 * ROWS * 128 + 4096


def sources(ctas: int, terms: int = TERMS, gather: bool = False) -> dict[str, KernelSource]:
    shape = ("CTAS", ctas), ("TERMS", terms)
    loads = (("GATHER", 1),) if gather else ()
    return {
        "mla_quantize": KernelSource("mla_quantize", ARCH, shape),
        "attention": KernelSource(_KERNELS[gather][0], ARCH, (*shape, *loads)),
    }


def load(device: int, terms: int = TERMS) -> None:
    """Loads all kernels. ImportError when they can be neither compiled nor found."""
    for ctas, gather in product((1, 2), (False, True)):
        _decode(device, ctas, terms, gather)
    _quantize(device, terms)


def quantize_queries(q_TND: Tensor, terms: int = TERMS) -> tuple[Tensor, Tensor]:
    """(uint8 [T * N, query_bytes], fp32 scales [T * N]); csrc/cuda/mla_quantize.cu says what is in the first."""
    rows = q_TND.shape[0] * q_TND.shape[1]
    out = torch.empty(rows, query_bytes(terms), dtype=torch.uint8, device=q_TND.device)
    scale = torch.empty(rows, dtype=torch.float32, device=q_TND.device)
    launch = _quantize(q_TND.device.index, terms)
    p = launch.params
    p.q, p.out, p.scale, p.rows = q_TND.data_ptr(), out.data_ptr(), scale.data_ptr(), rows
    launch(-(-rows // (_QUANTIZE_THREADS // 32)), torch.cuda.current_stream().cuda_stream)
    return out, scale


def mla_decode_fp8(
    q_TND: Tensor,
    kv_pages: Tensor,
    page_table_BP: Tensor,
    length_B: Tensor,
    query_start_B1: Tensor | None,
    softmax_scale: float,
    schedule: MlaSchedule,
    terms: int = TERMS,
) -> Tensor:
    """[T, N, LATENT] bfloat16. As mla_decode.mla_decode, but

    kv_pages: uint8 [pages, page_size, ENTRY_BYTES], contiguous; page_size a multiple of PAGE_MULTIPLE, or 1.
    terms: e4m3 numbers that a latent of a query becomes, 1 or 2.
    """
    (tokens, heads, _), (num_pages, page_size, _) = q_TND.shape, kv_pages.shape
    out_TNL = q_TND.new_empty(tokens, heads, LATENT)
    if tokens == 0:
        return out_TNL
    ctas, shares, stream = schedule.ctas, schedule.bound_S4.shape[0] - 1, torch.cuda.current_stream().cuda_stream
    rows = ctas * ROWS
    partial = torch.empty(2 * shares, rows, LATENT, dtype=torch.float32, device=q_TND.device)
    log_sum = torch.empty(2 * shares, rows, dtype=torch.float32, device=q_TND.device)
    gather = page_size == 1
    box_rows = 0 if gather else next(size for size in (64, 32, 16) if page_size % size == 0)
    q, q_scale = quantize_queries(q_TND, terms)
    launch = _decode(q_TND.device.index, ctas, terms, gather)
    p = launch.params
    p.q = byte_tiles(q.data_ptr(), len(q), query_bytes(terms), ROWS, query_bytes(terms) // 128)
    cache = kv_pages.data_ptr(), num_pages * page_size
    if not gather:
        p.latent, p.rope = (strided_tiles(*cache, ENTRY_BYTES, _TILES, box_rows, tiles) for tiles in (2, 1))
        p.scale = strided_pieces(cache[0] + LATENT + _ROPE_BYTES, cache[1], ENTRY_BYTES, _SCALE_BYTES, box_rows)
    p.entries = cache[0]
    p.all = lengths_of(length_B, query_start_B1, heads)
    p.bound, p.page_table, p.out = schedule.bound_S4.data_ptr(), page_table_BP.data_ptr(), out_TNL.data_ptr()
    p.partial, p.log_sum, p.softmax_scale = partial.data_ptr(), log_sum.data_ptr(), softmax_scale
    p.q_scale, p.q_rows = q_scale.data_ptr(), len(q)
    p.table_width, p.page_size = page_table_BP.stride(0), page_size
    p.box_rows, p.cache_rows = box_rows, cache[1]
    launch(shares * ctas, stream)
    combine_parts(p.all, schedule, partial, log_sum, out_TNL)
    return out_TNL


@functools.cache
def _quantize(device: int, terms: int) -> Launch:
    kernel = Kernel(sources(1, terms)["mla_quantize"], "eprt::mla_quantize", _QUANTIZE_THREADS)
    return Launch(kernel, MlaQuantizeParams(), starts_early=True)


@functools.cache
def _decode(device: int, ctas: int, terms: int, gather: bool = False) -> Launch:
    name, threads = _KERNELS[gather]
    kernel = Kernel(sources(ctas, terms, gather)["attention"], f"eprt::{name}", threads, shared_bytes(terms))
    return Launch(kernel, MlaDecodeFp8Params(), starts_early=True)
