"""Grouped matrix product: y = x W_e^T for rows grouped by expert, for few rows per expert above all.

With few rows the product is as fast as its weights are read. Hence: the weights' rows are the tile's long side (the
product is computed as W x^T, so that tensor cores get tiles of 64 to 128 weight rows however few tokens there are),
tiles of 16 to 64 tokens, loads several tiles ahead, and a grid that stays (each program takes tile after tile),
because how many tiles there are is known only on the GPU.

Three kinds of arithmetic, all accumulating in fp32:
    "fp8"   e4m3 times e4m3, each block of 128 columns scaled by both operands' fp32 scales before it is added
    "same"  bfloat16 times bfloat16
    "fp32"  float32 x; the weight, of any format, becomes float32 first: for accuracy, not for speed
"""

from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from eprt.ops.cuda.quantize import SMALLEST
from eprt.ops.cuda.silu import silu
from eprt.ops.cuda.tiles import find_tile, num_tiles
from eprt.ops.signal import TileSignal
from eprt.ops.tuning import Shape, Tiling, tuned
from eprt.ops.weight import BLOCK, Weight

FP8, SAME, FP32 = 0, 1, 2
_KIND_NAMES = ("fp8", "same", "fp32")


@triton.jit
def _product(
    acc, x, x_scale, w, w_scale, row, rows, w_row, first_N, x_stride, x_groups, w_groups, N, K, begin, end,
    KIND: tl.constexpr, BLOCK_K: tl.constexpr, SCALED_W: tl.constexpr, SCALE_BLOCK: tl.constexpr, TMA: tl.constexpr,
    THREADS: tl.constexpr,
):  # fmt: skip
    """acc [N tile, M tile] += W X^T over columns begin..end. X: so many rows from row on. W: the rows first_N.. of the
    N that start at w_row, in one scale block.

    What lies past N or past the rows lands in parts of the result that nobody reads; past K there are zeros. TMA: x and
    w are descriptors.
    """
    M: tl.constexpr = acc.shape[1]
    # As many loads of scales as threads, some of them alike: fewer, and each thread would load all that it needs,
    # 16 at 64 rows, instead of getting them from the others.
    ALIKE: tl.constexpr = THREADS // M if THREADS > M else 1
    # In place of rows that are others', the last one again: so no load needs a mask.
    scale_row = row + tl.minimum(tl.arange(0, M * ALIKE) // ALIKE, rows - 1)
    x_scale_at = x_scale + scale_row.to(tl.int64) * x_groups
    w_scale_at = w_scale + (first_N // SCALE_BLOCK).to(tl.int64) * w_groups
    if KIND == 0:  # scales come a step ahead: nothing waits for them
        next_x, next_w = tl.load(x_scale_at + begin // SCALE_BLOCK), tl.load(w_scale_at + begin // SCALE_BLOCK)
    for k in range(begin, end, BLOCK_K):
        if TMA:
            w_NK, x_KM = w.load([w_row + first_N, k]), tl.trans(x.load([row, k]))
        else:
            column, column_N = k + tl.arange(0, BLOCK_K), first_N + tl.arange(0, acc.shape[0])
            w_at = w + (w_row + column_N)[:, None].to(tl.int64) * K + column[None, :]
            w_NK = tl.load(w_at, mask=(column_N < N)[:, None] & (column < end)[None, :], other=0.0)
            row_M = row + tl.minimum(tl.arange(0, M), rows - 1)
            x_at = x + row_M[None, :].to(tl.int64) * x_stride + column[:, None]
            x_KM = tl.load(x_at, mask=(column < end)[:, None], other=0.0)
        if KIND == 0:
            factor_M = tl.max(tl.reshape(next_x * next_w, [M, ALIKE]), 1)
            group = tl.minimum(k + BLOCK_K, end - 1) // SCALE_BLOCK
            next_x, next_w = tl.load(x_scale_at + group), tl.load(w_scale_at + group)
            acc += tl.dot(w_NK, x_KM) * factor_M[None, :]
        elif KIND == 1:
            acc = tl.dot(w_NK, x_KM, acc)
        else:
            w_NK = w_NK.to(tl.float32)
            if SCALED_W:
                w_NK = w_NK * tl.load(w_scale_at + k // SCALE_BLOCK)
            acc = tl.dot(w_NK, x_KM, acc, input_precision="ieee")
    return acc


# What changes from step to step, or only finds scales, is no reason to compile once more.
@triton.jit(do_not_specialize=["num_experts", "num_rows", "slot_tiles", "scale_rows", "x_groups", "w_groups"])
def _grouped_gemm(
    y, y_scale, x, x_scale, w, w_scale, count_E, storage_E, signal, x_stride, x_groups, w_groups, N, K, num_experts,
    scale_rows, num_rows, slot_tiles,
    KIND: tl.constexpr, GATED: tl.constexpr, QUANTISE: tl.constexpr, GROUPED: tl.constexpr, HAS_STORAGE: tl.constexpr,
    SIGNALS: tl.constexpr, SCALED_W: tl.constexpr, SPLIT_K: tl.constexpr, EXPERTS: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SCALE_BLOCK: tl.constexpr, TMA: tl.constexpr, THREADS: tl.constexpr,
):  # fmt: skip
    """N: columns of y. GATED: w has 2N rows, gate then up, and y = silu(gate) * up. Not GROUPED: all rows are one
    expert's.

    SPLIT_K: the second axis of the grid splits K; y is then [splits, rows, N], to be added up.
    SIGNALS: every stored tile adds its columns to its rows' counter, so that N means all of them are there.
    """
    expert_E = tl.arange(0, EXPERTS)
    if GROUPED:
        count = tl.load(count_E + expert_E, mask=expert_E < num_experts, other=0)
    else:
        count = tl.where(expert_E == 0, num_rows, 0)
    k_begin, k_end = 0, K
    if SPLIT_K:
        share = ((K + BLOCK_K - 1) // BLOCK_K + tl.num_programs(1) - 1) // tl.num_programs(1) * BLOCK_K
        k_begin = tl.program_id(1) * share
        k_end = tl.minimum(K, k_begin + share)
    tiles_N = (N + BLOCK_N - 1) // BLOCK_N
    for tile in range(tl.program_id(0), num_tiles(count, BLOCK_M) * tiles_N, tl.num_programs(0)):
        expert, begin, rows, first = find_tile(tile // tiles_N, count, expert_E, BLOCK_M)
        storage = tl.load(storage_E + expert) if HAS_STORAGE else expert
        row, left, first_N = begin + first, rows - first, (tile % tiles_N) * BLOCK_N
        w_row = storage * (2 if GATED else 1) * N
        matrix_scale = w_scale + storage.to(tl.int64) * scale_rows * w_groups
        zero = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        y_NM = _product(
            zero, x, x_scale, w, matrix_scale, row, left, w_row, first_N, x_stride, x_groups, w_groups, N, K, k_begin,
            k_end, KIND, BLOCK_K, SCALED_W, SCALE_BLOCK, TMA, THREADS,
        )  # fmt: skip
        if GATED:
            up_scale = matrix_scale + (scale_rows // 2) * w_groups
            up_NM = _product(
                zero, x, x_scale, w, up_scale, row, left, w_row + N, first_N, x_stride, x_groups, w_groups, N, K,
                k_begin, k_end, KIND, BLOCK_K, SCALED_W, SCALE_BLOCK, TMA, THREADS,
            )  # fmt: skip
            y_NM = silu(y_NM) * up_NM
        member_M, column_N = tl.arange(0, BLOCK_M), first_N + tl.arange(0, BLOCK_N)
        inside_M, row_M = member_M < left, (row + member_M).to(tl.int64)
        if QUANTISE:  # BLOCK_N is the scale block
            y_NM = tl.where((column_N < N)[:, None], y_NM, 0.0)
            scale_M = tl.maximum(tl.max(tl.abs(y_NM), 0) / 448.0, SMALLEST)
            tl.store(y_scale + row_M * tiles_N + tile % tiles_N, scale_M, mask=inside_M)
            y_NM = y_NM / scale_M[None, :]
        y_MN = tl.trans(y_NM).to(y.dtype.element_ty)
        if SPLIT_K:
            row_M += tl.program_id(1).to(tl.int64) * num_rows
        to = y + row_M[:, None] * N + column_N[None, :]
        tl.store(to, y_MN, mask=inside_M[:, None] & (column_N < N)[None, :])
        if SIGNALS:
            tl.debug_barrier()  # all threads' stores come before the one thread's release
            columns = tl.minimum(N - first_N, BLOCK_N)
            tl.atomic_add(signal + expert * slot_tiles + first // BLOCK_M, columns, sem="release", scope="gpu")


def tiling_of(kind: int, rows_per_expert: int, gated: bool) -> Tiling:
    block_m = min(max(16, triton.next_power_of_2(rows_per_expert)), 64 if gated else 128)
    if kind == FP32:
        return Tiling(16, 64, 32, 4, 2, 2)
    if kind == SAME:
        return Tiling(min(block_m, 64), 128, 64, 8 if gated and block_m > 32 else 4, 4, 2)
    return Tiling(block_m, 64 if block_m > 64 else 128, 128, 4, 4, 3 if rows_per_expert <= 64 else 2)


def kind_of(x: Tensor, w: Weight) -> int:
    """ValueError where GPUs have no arithmetic for the two."""
    if w.data.dtype == torch.int8:
        raise ValueError("int8 weights run on the CPU only; on GPUs use fp8 or bfloat16 weights")
    if x.dtype == torch.float32:
        return FP32
    if x.dtype == torch.float8_e4m3fn and w.data.dtype == torch.float8_e4m3fn:
        return FP8
    if x.dtype == w.data.dtype == torch.bfloat16:
        return SAME
    raise ValueError(f"no product of {x.dtype} rows and {w.data.dtype} weights on GPUs")


def grouped_gemm(
    x_RK: Tensor,
    w: Weight,
    *,
    x_scale_RG: Tensor | None = None,
    recv_count_E: Tensor | None = None,
    storage_E: Tensor | None = None,
    gated: bool = False,
    quantise: bool = False,
    out_RN: Tensor | None = None,
    dtype: torch.dtype | None = None,
    tiling: Tiling | None = None,
    splits: int = 1,
    expected_rows: int | None = None,
    signal: TileSignal | None = None,
    num_sms: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """(y [R, N], its scales [R, ceil(N / 128)] if quantised). Rows past the sum of recv_count_E stay unwritten.

    x_RK: rows of expert e follow those of e - 1; e4m3 with x_scale_RG, bfloat16 or float32. w: [E, N, K] ([E, 2N, K] if
    gated: gate rows, then up rows; y is then silu(gate) * up); a matrix [N, K] without recv_count_E is applied to all
    rows. storage_E: the matrix of each expert. quantise: y is e4m3. dtype: of y otherwise, default bfloat16 or float32.
    splits: parts of K computed apart, ungrouped only, but none empty; y is then fp32 [parts, R, N], to be added up.
    expected_rows: about how many rows there will be in all, where R is a bound; it chooses the tiling. signal: see
    TileSignal. num_sms: SMs to compute on, default all.
    """
    kind, (R, K), stored_rows = kind_of(x_RK, w), x_RK.shape, w.shape[-2]
    N = stored_rows // 2 if gated else stored_rows
    num_experts = 1 if recv_count_E is None else recv_count_E.shape[0]
    if tiling is None:
        rows = -(-min(R, expected_rows or R) // num_experts)
        tiling = _choose(x_RK.device, Shape(num_experts, N, K, _KIND_NAMES[kind], gated), rows)
    if signal is not None:
        tiling = _signalling(tiling, signal, num_experts)
    parts = _filled_parts(K, tiling.block_k, splits)
    if out_RN is None:
        dtype = torch.float8_e4m3fn if quantise else dtype or (torch.float32 if kind == FP32 else torch.bfloat16)
        size, dtype = ((R, N), dtype) if splits == 1 else ((parts, R, N), torch.float32)
        out_RN = x_RK.new_empty(size, dtype=dtype)
    scale_RG = x_RK.new_empty(R, triton.cdiv(N, BLOCK), dtype=torch.float32) if quantise else None
    if R == 0:
        return out_RN, scale_RG
    most_tiles = (triton.cdiv(R, tiling.block_m) + num_experts) * triton.cdiv(N, tiling.block_n)
    x, matrices, tma = _operands(x_RK, w.data, tiling, kind)
    programs = (num_sms or count_sms(x_RK.device)) * tiling.programs_per_sm
    _grouped_gemm[(min(most_tiles, programs), parts)](
        out_RN, out_RN if scale_RG is None else scale_RG, x, x_RK if x_scale_RG is None else x_scale_RG,
        matrices, w.data if w.scale is None else w.scale, x_RK if recv_count_E is None else recv_count_E,
        x_RK if storage_E is None else storage_E, x_RK if signal is None else signal.counter,
        x_RK.stride(0), 0 if x_scale_RG is None else x_scale_RG.stride(0),
        triton.cdiv(K, BLOCK), N, K, num_experts, triton.cdiv(stored_rows, BLOCK), R,
        0 if signal is None else signal.slot_tiles,
        KIND=kind, GATED=gated, QUANTISE=quantise, GROUPED=recv_count_E is not None,
        HAS_STORAGE=storage_E is not None, SIGNALS=signal is not None, SCALED_W=w.scale is not None, SPLIT_K=splits > 1,
        EXPERTS=triton.next_power_of_2(num_experts), BLOCK_M=tiling.block_m, BLOCK_N=tiling.block_n,
        BLOCK_K=tiling.block_k, SCALE_BLOCK=BLOCK, TMA=tma, THREADS=32 * tiling.num_warps,
        num_warps=tiling.num_warps, num_stages=tiling.num_stages,
    )  # fmt: skip
    return out_RN, scale_RG


def _filled_parts(k: int, block_k: int, splits: int) -> int:
    """Of so many parts of K, each of whole blocks, those that get any: others would look for scales behind the end."""
    blocks = triton.cdiv(k, block_k)
    return triton.cdiv(blocks, triton.cdiv(blocks, splits))


def _operands(x_RK: Tensor, w: Tensor, tiling: Tiling, kind: int) -> tuple[Any, Any, bool]:
    """x and w as the kernel takes them, and whether as descriptors: tiles then come by TMA and need no registers."""
    aligned = x_RK.stride(0) * x_RK.element_size() % 16 == 0 and w.shape[-1] * w.element_size() % 16 == 0
    if kind == FP32 or not aligned or (x_RK.data_ptr() | w.data_ptr()) % 16 or not _has_tma(x_RK.device):
        return x_RK, w, False
    rows = w.view(-1, w.shape[-1])
    descriptor = TensorDescriptor.from_tensor
    block = descriptor(x_RK, [tiling.block_m, tiling.block_k]), descriptor(rows, [tiling.block_n, tiling.block_k])
    return *block, True


def _has_tma(device: torch.device) -> bool:
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (9, 0)


def _choose(device: torch.device, shape: Shape, rows_per_expert: int) -> Tiling:
    """Measured for this very shape, else the default."""
    return tuned(device, shape, rows_per_expert) or tiling_of(
        _KIND_NAMES.index(shape.kind), rows_per_expert, shape.gated
    )


def _signalling(tiling: Tiling, signal: TileSignal, num_experts: int) -> Tiling:
    """The tiling, its tiles as tall as the signal's."""
    tall, counters = signal.block_m, signal.counter.numel()
    if tall not in (16, 32, 64, 128) or counters != num_experts * signal.slot_tiles:
        raise ValueError(
            f"signal: block_m={tall}, {counters} counters; must be 16, 32, 64 or 128, and {num_experts} experts * "
            f"slot_tiles={signal.slot_tiles}"
        )
    if tall == tiling.block_m:
        return tiling
    return replace(tiling, block_m=tall, num_warps=8 if tall > 64 else tiling.num_warps)


def count_sms(device: torch.device) -> int:
    """The interpreter has no GPU: there a few programs do."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 3
