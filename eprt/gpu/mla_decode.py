"""Latent attention of decodes on Hopper (csrc/cuda/mla_*.cu): the schedule of a step, the attention, the sum of what
the schedule cut.

Knows how to build and launch these kernels and what they take; when they are used is known to eprt/ops/cuda.
"""

import ctypes
import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from eprt.gpu.jit import KernelSource
from eprt.gpu.launch import Kernel, Launch
from eprt.gpu.tensor_map import TensorMap, byte_tiles

ARCH = "sm_90a"
LATENT, ROPE, ENTRY_BYTES = 512, 64, 1152
ROWS, KEYS = 64, 64  # of a thread block, of a step: queries (token, head) and positions
PAGE_MULTIPLE = 16  # the positions of a page are a multiple of this
_SCHEDULE_THREADS, _COMBINE_THREADS, _THREADS = 256, 256, 384
# Two buffers of positions, the queries, and what is small; in front of them what aligns them.
_SHARED_BYTES = 1024 + (2 * KEYS + ROWS) * ENTRY_BYTES + 2048
_OVERHEAD = 5  # blocks of positions that the beginning and the end of a unit take as long as
_CUT = 4  # the same, for a cut of a unit, of each of the two shares


class Bound(ctypes.Structure):
    """Where a share begins; csrc/cuda/mla_work.cuh explains the fields."""

    _fields_ = tuple((name, ctypes.c_int32) for name in ("request", "group", "block", "unused"))


class Lengths(ctypes.Structure):
    """As in csrc/cuda/mla_work.cuh."""

    _fields_ = (
        ("length", ctypes.c_void_p),
        ("query_start", ctypes.c_void_p),
        ("requests", ctypes.c_int32),
        ("heads", ctypes.c_int32),
    )


class MlaScheduleParams(ctypes.Structure):
    """The argument of csrc/cuda/mla_schedule.cu."""

    _fields_ = (
        ("all", Lengths),
        ("bound", ctypes.c_void_p),
        ("shares", ctypes.c_int32),
        ("overhead", ctypes.c_int32),
        ("cut", ctypes.c_int32),
        ("whole", ctypes.c_int32),
    )


class MlaDecodeParams(ctypes.Structure):
    """The argument of csrc/cuda/mla_decode.cu."""

    _fields_ = (
        ("q", TensorMap),
        ("kv", TensorMap),
        ("kv_pair", TensorMap),
        ("all", Lengths),
        ("entries", ctypes.c_void_p),
        ("bound", ctypes.c_void_p),
        ("page_table", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("partial", ctypes.c_void_p),
        ("log_sum", ctypes.c_void_p),
        ("table_width", ctypes.c_int32),
        ("page_size", ctypes.c_int32),
        ("box_rows", ctypes.c_int32),
        ("cache_rows", ctypes.c_int32),
        ("scale", ctypes.c_float),
        ("_", ctypes.c_uint8 * 36),  # pads the struct to a multiple of a tensor map's alignment
    )


class MlaCombineParams(ctypes.Structure):
    """The argument of csrc/cuda/mla_combine.cu."""

    _fields_ = (
        ("all", Lengths),
        ("bound", ctypes.c_void_p),
        ("partial", ctypes.c_void_p),
        ("log_sum", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("shares", ctypes.c_int32),
    )


@dataclass(frozen=True)
class MlaSchedule:
    """Who computes what, for all layers of a step."""

    ctas: int  # thread blocks of a cluster
    bound_S4: Tensor  # int32 [shares + 1, 4]: each is a Bound


def sources(ctas: int, gather: bool = False) -> dict[str, KernelSource]:
    shape = ("CTAS", ctas)
    loads = (("GATHER", 1),) if gather else ()
    return {
        "mla_schedule": KernelSource("mla_schedule", ARCH, (shape,)),
        "mla_decode": KernelSource("mla_decode", ARCH, (shape, *loads)),
        "mla_combine": KernelSource("mla_combine", ARCH, (shape,)),
    }


def load(device: int) -> None:
    """Loads all kernels. ImportError when they can be neither compiled nor found."""
    for ctas in (1, 2):
        for kernel in (_schedule, _decode, _combine):
            kernel(device, ctas)
        _decode(device, ctas, True)


def ctas_of(heads: int, tokens: int, requests: int) -> int:
    """Two thread blocks share a request's positions where a request has more rows than one of them takes."""
    return 2 if heads * tokens > ROWS * requests else 1


def make_schedule(
    length_B: Tensor, query_start_B1: Tensor | None, heads: int, tokens: int, whole: bool = False
) -> MlaSchedule:
    """length_B, query_start_B1: int32, contiguous.

    whole: no request's context is cut, so the bits of its results do not depend on the other requests.
    """
    requests, device = length_B.shape[0], length_B.device
    ctas = ctas_of(heads, tokens, requests)
    shares = torch.cuda.get_device_properties(device).multi_processor_count // ctas
    schedule = MlaSchedule(ctas, torch.empty(shares + 1, 4, dtype=torch.int32, device=device))
    launch = _schedule(device.index, ctas)
    p = launch.params
    p.all = lengths_of(length_B, query_start_B1, heads)
    p.bound, p.shares, p.overhead, p.cut = schedule.bound_S4.data_ptr(), shares, _OVERHEAD, _CUT
    p.whole = whole
    launch(1, torch.cuda.current_stream(device).cuda_stream)
    return schedule


def mla_decode(
    q_TND: Tensor,
    kv_pages: Tensor,
    page_table_BP: Tensor,
    length_B: Tensor,
    query_start_B1: Tensor | None,
    softmax_scale: float,
    schedule: MlaSchedule,
) -> Tensor:
    """[T, N, LATENT] bfloat16.

    q_TND: bfloat16, contiguous, [latent | rotated].
    kv_pages: bfloat16 [pages, page_size, 576], contiguous; page_size a multiple of PAGE_MULTIPLE, or 1.
    page_table_BP, length_B, query_start_B1: int32, contiguous in their last dimension.
    schedule: of the same lengths, heads and number of tokens.
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
    launch = _decode(q_TND.device.index, ctas, gather)
    p = launch.params
    p.q = byte_tiles(q_TND.data_ptr(), tokens * heads, ENTRY_BYTES, ROWS, 3)
    cache = kv_pages.data_ptr(), num_pages * page_size
    if not gather:
        p.kv, p.kv_pair = (byte_tiles(*cache, ENTRY_BYTES, box_rows, tiles) for tiles in (1, 2))
    p.all = lengths_of(length_B, query_start_B1, heads)
    p.entries = cache[0]
    p.bound, p.page_table, p.out = schedule.bound_S4.data_ptr(), page_table_BP.data_ptr(), out_TNL.data_ptr()
    p.partial, p.log_sum, p.scale = partial.data_ptr(), log_sum.data_ptr(), softmax_scale
    p.table_width, p.page_size = page_table_BP.stride(0), page_size
    p.box_rows, p.cache_rows = box_rows, cache[1]
    launch(shares * ctas, stream)
    combine_parts(p.all, schedule, partial, log_sum, out_TNL)
    return out_TNL


def combine_parts(lengths: Lengths, schedule: MlaSchedule, partial: Tensor, log_sum: Tensor, out_TNL: Tensor) -> None:
    """Adds up the parts of units that the schedule cut, and stores them; out_TNL has all others already."""
    ctas, shares = schedule.ctas, schedule.bound_S4.shape[0] - 1
    launch = _combine(out_TNL.device.index, ctas)
    p = launch.params
    p.all, p.bound, p.partial, p.log_sum = lengths, schedule.bound_S4.data_ptr(), partial.data_ptr(), log_sum.data_ptr()
    p.out, p.shares = out_TNL.data_ptr(), shares
    launch((shares - 1) * ctas * ROWS // (_COMBINE_THREADS // 32), torch.cuda.current_stream().cuda_stream)


def lengths_of(length_B: Tensor, query_start_B1: Tensor | None, heads: int) -> Lengths:
    start = None if query_start_B1 is None else query_start_B1.data_ptr()
    return Lengths(length_B.data_ptr(), start, length_B.shape[0], heads)


@functools.cache
def _schedule(device: int, ctas: int) -> Launch:
    kernel = Kernel(sources(ctas)["mla_schedule"], "eprt::mla_schedule", _SCHEDULE_THREADS)
    return Launch(kernel, MlaScheduleParams())


@functools.cache
def _decode(device: int, ctas: int, gather: bool = False) -> Launch:
    kernel = Kernel(sources(ctas, gather)["mla_decode"], "eprt::mla_decode", _THREADS, _SHARED_BYTES)
    return Launch(kernel, MlaDecodeParams(), starts_early=True)


@functools.cache
def _combine(device: int, ctas: int) -> Launch:
    kernel = Kernel(sources(ctas)["mla_combine"], "eprt::mla_combine", _COMBINE_THREADS)
    return Launch(kernel, MlaCombineParams(), starts_early=True)
