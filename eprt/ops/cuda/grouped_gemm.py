"""Grouped matrix product: y = x W_e^T for rows grouped by expert, above all for few rows per expert.

With few rows the time of the product is the time to read its weights. Hence weight rows are the long side of a tile
(the product is computed as W x^T, so tensor cores get tiles of 64 to 128 weight rows however few tokens there are),
tiles have 16 to 64 tokens, loads are several tiles ahead, and the grid is persistent: each program takes tile after
tile, because only the GPU knows how many tiles there are.

Five kinds of arithmetic:
    "fp8"   e4m3 times e4m3, each block of 128 columns scaled by both operands' fp32 scales before it is added in fp32
    "same"  bfloat16 times bfloat16, added in fp32
    "fp32"  float32 x; the weight, of any format, is converted to float32 first: for accuracy, not for speed
    "int8"  int8 times int8, added in int32 without rounding, then scaled by both rows' fp32 scales
    "fp4"   bfloat16 times fp4, which becomes bfloat16 inside the product without rounding, added in fp32

Knows nothing of layers, nor who waits for a signal.
"""

from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from eprt.ops.cuda.fp4_tile import PLANES
from eprt.ops.cuda.planes import to_planes
from eprt.ops.cuda.quantize import SMALLEST
from eprt.ops.cuda.tile_product import columns_of_program, multiply_tile
from eprt.ops.cuda.tiles import find_tile, num_tiles
from eprt.ops.signal import TileSignal
from eprt.ops.tuning import ProductShape, Tiling, tuned
from eprt.ops.weight import BLOCK, FP4_BLOCK, Weight

FP8, SAME, FP32, INT8, FP4 = 0, 1, 2, 3, 4
KIND_NAMES = ("fp8", "same", "fp32", "int8", "fp4")
_PLANES = tl.constexpr(PLANES)
_KIND_OF_DTYPE = {torch.float8_e4m3fn: FP8, torch.bfloat16: SAME, torch.int8: INT8}


@triton.jit
def _store_tile(y, y_scale, y_NM, x_rows, first_N, N, num_rows, SPLIT_K: tl.constexpr, IN_PLANES: tl.constexpr):
    """Stores a tile of y; quantised, with y_scale."""
    row, left = x_rows
    BLOCK_N: tl.constexpr = y_NM.shape[0]
    member_M, column_N = tl.arange(0, y_NM.shape[1]), first_N + tl.arange(0, BLOCK_N)
    inside_M, row_M = member_M < left, (row + member_M).to(tl.int64)
    if y_scale is not None:  # BLOCK_N is the scale block
        tiles_N = (N + BLOCK_N - 1) // BLOCK_N
        y_NM = tl.where((column_N < N)[:, None], y_NM, 0.0)
        scale_M = tl.maximum(tl.max(tl.abs(y_NM), 0) / 448.0, SMALLEST)
        tl.store(y_scale + row_M * tiles_N + first_N // BLOCK_N, scale_M, mask=inside_M)
        y_NM = y_NM / scale_M[None, :]
    y_MN = tl.trans(y_NM).to(y.dtype.element_ty)
    if SPLIT_K:
        row_M += tl.program_id(1).to(tl.int64) * num_rows
    if IN_PLANES:
        plane_row = (column_N % _PLANES).to(tl.int64)[None, :] * num_rows + row_M[:, None]
        to = y + plane_row * (N // _PLANES) + (column_N // _PLANES)[None, :]
    else:
        to = y + row_M[:, None] * N + column_N[None, :]
    tl.store(to, y_MN, mask=inside_M[:, None] & (column_N < N)[None, :])


@triton.jit
def _counts(count_E, expert_E, num_experts, num_rows):
    """Rows of each expert."""
    if count_E is None:
        return tl.where(expert_E == 0, num_rows, 0)
    else:
        return tl.load(count_E + expert_E, mask=expert_E < num_experts, other=0)


# Values that change from step to step, and strides that only find scales, must not cause another compilation.
@triton.jit(do_not_specialize=["num_experts", "num_rows", "slot_tiles", "scale_rows", "x_groups", "w_groups"])
def _grouped_gemm(
    y,
    y_scale,
    x,
    x_scale,
    w,
    w_scale,
    count_E,
    matrix_E,
    signal,
    limit,
    x_stride,
    x_groups,
    w_groups,
    N,
    K,
    num_experts,
    scale_rows,
    num_rows,
    slot_tiles,
    KIND: tl.constexpr,
    GATED: tl.constexpr,
    SPLIT_K: tl.constexpr,
    IN_PLANES: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TMA: tl.constexpr,
    THREADS: tl.constexpr,
):
    """y [rows, N], tile after tile. Without count_E all rows are one expert's; without matrix_E expert e has matrix e.

    y_scale: y is quantised.
    signal: every stored tile adds its columns to the counter of its rows, which is N when all of them are stored.
    GATED: w has 2N rows per matrix, gate then up, and y = silu(gate) * up, both cut to the limit.
    IN_PLANES: y is stored as planes.py does. So is x where the weights are fp4: x_groups is then num_rows.
    SPLIT_K: the grid's second axis splits K; y is [splits, rows, N], to be added up.
    """
    expert_E = tl.arange(0, EXPERTS)
    count = _counts(count_E, expert_E, num_experts, num_rows)
    if KIND == 4 and TMA:  # so that the compiler knows how these scales are aligned; see _operands
        w_groups = K // 256 * 8
    operands, strides = (x, x_scale, w, w_scale), (x_stride, x_groups, w_groups, scale_rows)
    columns = columns_of_program(K, SPLIT_K, BLOCK_K)
    tiles_N = (N + BLOCK_N - 1) // BLOCK_N
    for tile in range(tl.program_id(0), num_tiles(count, BLOCK_M) * tiles_N, tl.num_programs(0)):
        expert, begin, rows, first = find_tile(tile // tiles_N, count, expert_E, BLOCK_M)
        matrix = expert if matrix_E is None else tl.load(matrix_E + expert)
        x_rows, first_N = (begin + first, rows - first), (tile % tiles_N) * BLOCK_N
        w_tile = (matrix, first_N, N)
        y_NM = multiply_tile(
            operands, x_rows, w_tile, columns, strides, limit, KIND, GATED, BLOCK_M, BLOCK_N, BLOCK_K, TMA, THREADS
        )
        _store_tile(y, y_scale, y_NM, x_rows, first_N, N, num_rows, SPLIT_K, IN_PLANES)
        if signal is not None:
            tl.debug_barrier()  # all threads' stores before one thread's release
            num_columns = tl.minimum(N - first_N, BLOCK_N)
            tl.atomic_add(signal + expert * slot_tiles + first // BLOCK_M, num_columns, sem="release", scope="gpu")


def tiling_of(kind: int, rows_per_expert: int, gated: bool) -> Tiling:
    """The default, for shapes that were not measured."""
    block_m = min(max(16, triton.next_power_of_2(rows_per_expert)), 64 if gated else 128)
    if kind == FP32:
        return Tiling(16, 64, 32, 4, 2, 2)
    if kind == FP4 and block_m > 64:
        return Tiling(block_m, 128, 128, 8, 3, 1)
    if kind == FP4:
        return Tiling(block_m, 128, 256, 4, 3, 2)
    if kind == SAME and rows_per_expert > 64:
        return Tiling(128, 128, 64, 8 if gated else 4, 3, 2)
    if kind == SAME:
        return Tiling(min(block_m, 64), 128, 64, 8 if gated and block_m > 32 else 4, 4, 2)
    if kind == INT8:
        # Triton waits for each product of tiles that is added in int32: other programs of the SM fill the gap.
        return Tiling(block_m, 64 if block_m == 16 and not gated else 128, 128, 4, 3, 3 if block_m < 128 else 2)
    return Tiling(block_m, 64 if block_m > 64 else 128, 128, 4, 4, 3 if rows_per_expert <= 64 else 2)


def kind_of(x: Tensor, w: Weight) -> int:
    """FP8, SAME, FP32 or INT8. ValueError for operands whose product GPUs do not compute."""
    if x.dtype == torch.float32:
        return FP32
    if x.dtype == torch.bfloat16 and w.is_fp4:
        return FP4
    if x.dtype == w.data.dtype and x.dtype in _KIND_OF_DTYPE:
        return _KIND_OF_DTYPE[x.dtype]
    raise ValueError(f"no product of {x.dtype} rows and {w.data.dtype} weights on GPUs")


def grouped_gemm(
    x_RK: Tensor,
    w: Weight,
    *,
    x_scale_RG: Tensor | None = None,
    recv_count_E: Tensor | None = None,
    matrix_E: Tensor | None = None,
    gated: bool = False,
    quantise: bool = False,
    out_RN: Tensor | None = None,
    dtype: torch.dtype | None = None,
    tiling: Tiling | None = None,
    splits: int = 1,
    expected_rows: int | None = None,
    signal: TileSignal | None = None,
    num_sms: int | None = None,
    limit: float | None = None,
    in_planes: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """(y [R, N], its scales [R, ceil(N / 128)] if quantised). Rows past the sum of recv_count_E stay unwritten.

    x_RK: rows of expert 0, then of expert 1, ...: e4m3 or int8 with x_scale_RG, bfloat16 or float32. For fp4 weights
        bfloat16, or its planes [4, R, K / 4] (planes.py).
    x_scale_RG: fp32, a scale per 128 columns of e4m3 rows (G = K / 128, rounded up) or per int8 row (G = 1).
    w: [E, N, K], or [E, 2N, K] if gated. Without recv_count_E: one matrix, for all rows.
    matrix_E: the index of each expert's matrix in w; default: expert e has matrix e.
    gated: w holds gate rows, then up rows; y = silu(gate) * up.
    quantise: y is e4m3.
    dtype: of y if it is not quantised; default: float32 for float32 x, else bfloat16.
    splits: parts of K to compute separately (ungrouped only); y is then fp32 [parts, R, N], to be added up. There may
        be fewer parts than splits, as none is empty.
    expected_rows: about how many rows there are, when R is an upper bound; chooses the tiling.
    signal: counts the stored tiles.
    num_sms: SMs to compute on; default: all.
    limit: what enters silu is cut to at most this, what it is multiplied by to -limit..limit.
    in_planes: y is [4, R, N / 4], for a product with fp4 weights.
    """
    kind, K, N = kind_of(x_RK, w), w.shape[-1], w.shape[-2] // (2 if gated else 1)
    if kind == FP4 and x_RK.dim() == 2:
        x_RK = to_planes(x_RK, recv_count_E=recv_count_E)
    R = x_RK.shape[-2]
    num_experts = 1 if recv_count_E is None else recv_count_E.shape[0]
    if tiling is None:
        rows = -(-min(R, expected_rows or R) // num_experts)
        tiling = _choose_tiling(x_RK.device, ProductShape(num_experts, N, K, KIND_NAMES[kind], gated), rows)
    if signal is not None:
        tiling = _with_tiles_of(signal, tiling, kind, num_experts)
    parts = _filled_parts(K, tiling.block_k, splits)
    if out_RN is None:
        size = (PLANES, R, N // PLANES) if in_planes else (R, N)
        dtype = torch.float8_e4m3fn if quantise else dtype or (torch.float32 if kind == FP32 else torch.bfloat16)
        size, dtype = (size, dtype) if splits == 1 else ((parts, R, N), torch.float32)
        out_RN = x_RK.new_empty(size, dtype=dtype)
    scale_RG = x_RK.new_empty(R, triton.cdiv(N, BLOCK), dtype=torch.float32) if quantise else None
    if R:
        most_tiles = (triton.cdiv(R, tiling.block_m) + num_experts) * triton.cdiv(N, tiling.block_n)
        programs = min(most_tiles, (num_sms or count_sms(x_RK.device)) * tiling.programs_per_sm)
        grid, how = (programs, parts), {"gated": gated, "splits": splits, "limit": limit, "in_planes": in_planes}
        _launch(grid, x_RK, x_scale_RG, w, out_RN, scale_RG, recv_count_E, matrix_E, signal, kind, tiling, **how)
    return out_RN, scale_RG


def _launch(
    grid: tuple[int, int],
    x_RK: Tensor,
    x_scale_RG: Tensor | None,
    w: Weight,
    out_RN: Tensor,
    scale_RG: Tensor | None,
    recv_count_E: Tensor | None,
    matrix_E: Tensor | None,
    signal: TileSignal | None,
    kind: int,
    tiling: Tiling,
    *,
    gated: bool,
    splits: int,
    limit: float | None,
    in_planes: bool,
) -> None:
    x, matrices, tma = _operands(x_RK, w.data, tiling, kind)
    scale_rows, w_groups = _scales_of_matrix(w)
    num_experts = 1 if recv_count_E is None else recv_count_E.shape[0]
    _grouped_gemm[grid](
        out_RN,
        scale_RG,
        x,
        x_scale_RG,
        matrices,
        w.scale,
        recv_count_E,
        matrix_E,
        None if signal is None else signal.counter,
        limit,
        x_RK.stride(-2),
        x_RK.shape[-2] if kind == FP4 else 0 if x_scale_RG is None else x_scale_RG.stride(0),
        w_groups,
        w.shape[-2] // (2 if gated else 1),
        w.shape[-1],
        num_experts,
        scale_rows,
        x_RK.shape[-2],
        0 if signal is None else signal.slot_tiles,
        KIND=kind,
        GATED=gated,
        SPLIT_K=splits > 1,
        IN_PLANES=in_planes,
        EXPERTS=triton.next_power_of_2(num_experts),
        BLOCK_M=tiling.block_m,
        BLOCK_N=tiling.block_n,
        BLOCK_K=tiling.block_k,
        TMA=tma,
        THREADS=32 * tiling.num_warps,
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
    )


def _scales_of_matrix(w: Weight) -> tuple[int, int]:
    """(rows of scales of one matrix, scales of such a row)"""
    n, k = w.shape[-2:]
    if w.is_fp4:
        return n, k // FP4_BLOCK
    return (n, 1) if w.data.dtype == torch.int8 else (triton.cdiv(n, BLOCK), triton.cdiv(k, BLOCK))


def _filled_parts(k: int, block_k: int, splits: int) -> int:
    """How many of `splits` parts of K, in whole blocks, are not empty. An empty one would read scales past the end."""
    blocks = triton.cdiv(k, block_k)
    return triton.cdiv(blocks, triton.cdiv(blocks, splits))


def _operands(x_RK: Tensor, w: Tensor, tiling: Tiling, kind: int) -> tuple[Any, Any, bool]:
    """(x, w, whether these are descriptors): tiles loaded by TMA through descriptors need no registers."""
    if kind == FP4:
        x_RK, w = x_RK.flatten(0, 1), w.view(torch.int16)  # rows of all planes; words of four values
    aligned = x_RK.stride(0) * x_RK.element_size() % 16 == 0 and w.shape[-1] * w.element_size() % 16 == 0
    if kind == FP32 or not aligned or (x_RK.data_ptr() | w.data_ptr()) % 16 or not _has_tma(x_RK.device):
        return x_RK, w, False
    if kind == FP4 and w.shape[-1] % 64:  # scales of a row are not whole multiples of 8 bytes
        return x_RK, w, False
    rows, columns = w.view(-1, w.shape[-1]), tiling.block_k // (PLANES if kind == FP4 else 1)
    descriptor = TensorDescriptor.from_tensor
    return descriptor(x_RK, [tiling.block_m, columns]), descriptor(rows, [tiling.block_n, columns]), True


def _has_tma(device: torch.device) -> bool:
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (9, 0)


def _choose_tiling(device: torch.device, shape: ProductShape, rows_per_expert: int) -> Tiling:
    """The measured tiling of this shape, else the default."""
    return tuned(device, shape, rows_per_expert) or tiling_of(
        KIND_NAMES.index(shape.kind), rows_per_expert, shape.gated
    )


def _with_tiles_of(signal: TileSignal, tiling: Tiling, kind: int, num_experts: int) -> Tiling:
    """The tiling with tiles as tall as the signal's."""
    tall, counters = signal.block_m, signal.counter.numel()
    if tall not in (16, 32, 64, 128) or counters != num_experts * signal.slot_tiles:
        raise ValueError(
            f"signal: block_m={tall}, {counters} counters; must be 16, 32, 64 or 128, and {num_experts} experts * "
            f"slot_tiles={signal.slot_tiles}"
        )
    if tall == tiling.block_m:
        return tiling
    if kind == FP4:
        return tiling_of(kind, tall, gated=False)
    return replace(tiling, block_m=tall, num_warps=8 if tall > 64 else tiling.num_warps)


def count_sms(device: torch.device) -> int:
    """SMs of a GPU. On the CPU, in Triton's interpreter, a few programs suffice."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 3
