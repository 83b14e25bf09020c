"""One tile of a grouped product: loads, multiplication, scaling. Device functions of grouped_gemm.py's kernel.

Arguments that several functions share:
    operands: (x, scales of x, w, scales of w); scales are None where there are none
    x_rows: (first row of x, rows from there on)
    columns: (first, end, K): the part of K to multiply
    strides: (of a row of x, of a row of its scales, of a row of w's scales, rows of a matrix's scales)
    KIND: 0 e4m3 times e4m3, 1 bfloat16 times bfloat16, 2 in float32, 3 int8 times int8, 4 bfloat16 times fp4
    TMA: x and w are descriptors
Knows nothing of which tiles there are, nor where results go.
"""

import triton
import triton.language as tl

from eprt.ops.cuda.fp4_tile import fp4_product, load_fp4
from eprt.ops.cuda.silu import silu_times
from eprt.ops.weight import BLOCK

_SCALE_BLOCK = tl.constexpr(BLOCK)


@triton.jit
def columns_of_program(K, SPLIT_K: tl.constexpr, BLOCK_K: tl.constexpr):
    """`columns` of this program: with SPLIT_K the grid's second axis splits K, in whole blocks."""
    if SPLIT_K:
        share = ((K + BLOCK_K - 1) // BLOCK_K + tl.num_programs(1) - 1) // tl.num_programs(1) * BLOCK_K
        begin = tl.program_id(1) * share
        return begin, tl.minimum(K, begin + share), K
    else:
        return 0, K, K


@triton.jit
def _load_rows(x, x_rows, columns, x_stride, k, M: tl.constexpr, BLOCK_K: tl.constexpr):
    """x [BLOCK_K, M] of the columns from k on."""
    row, rows = x_rows
    _, end, _ = columns
    column, row_M = k + tl.arange(0, BLOCK_K), row + tl.minimum(tl.arange(0, M), rows - 1)
    x_at = x + row_M[None, :].to(tl.int64) * x_stride + column[:, None]
    return tl.load(x_at, mask=(column < end)[:, None], other=0.0)


@triton.jit
def _load_tiles(
    x,
    w,
    x_rows,
    w_rows,
    columns,
    x_stride,
    k,
    M: tl.constexpr,
    TILE_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TMA: tl.constexpr,
):
    """(w [TILE_N, BLOCK_K], x [BLOCK_K, M]) of the columns from k on."""
    row, _ = x_rows
    w_row, first_N, N = w_rows
    _, end, K = columns
    if TMA:
        return w.load([w_row + first_N, k]), tl.trans(x.load([row, k]))
    else:
        column, column_N = k + tl.arange(0, BLOCK_K), first_N + tl.arange(0, TILE_N)
        w_at = w + (w_row + column_N)[:, None].to(tl.int64) * K + column[None, :]
        w_NK = tl.load(w_at, mask=(column_N < N)[:, None] & (column < end)[None, :], other=0.0)
        return w_NK, _load_rows(x, x_rows, columns, x_stride, k, M, BLOCK_K)


@triton.jit
def _product(
    acc,
    operands,
    x_rows,
    w_rows,
    columns,
    strides,
    KIND: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TMA: tl.constexpr,
    THREADS: tl.constexpr,
):
    """acc [N tile, M tile] += W X^T, without the scales of int8 rows.

    Past N or past the rows the result is undefined and never stored; past K both operands are 0.
    w_rows: (first row of the matrix, first row of the tile within it, N). The tile lies in one scale block.
    """
    x, x_scale, w, w_scale = operands
    begin, end, _ = columns
    x_stride, x_groups, w_groups, _ = strides
    row, rows = x_rows
    _, first_N, _ = w_rows
    M: tl.constexpr = acc.shape[1]
    # As many scales are loaded as there are threads, some of them twice: with fewer loads each thread would load all
    # scales that it needs (16 for 64 rows) instead of getting them from other threads.
    ALIKE: tl.constexpr = THREADS // M if THREADS > M else 1
    if KIND == 0:  # the last row stands in for rows of others, so that no load needs a mask
        scale_row = row + tl.minimum(tl.arange(0, M * ALIKE) // ALIKE, rows - 1)
        x_scale_at = x_scale + scale_row.to(tl.int64) * x_groups
    FP4: tl.constexpr = KIND == 2 and w.dtype.element_ty == tl.uint8
    if w_scale is not None:
        w_scale_at = w_scale + (first_N // _SCALE_BLOCK).to(tl.int64) * w_groups
    if KIND == 0:  # load scales one step ahead, so that nothing waits for them
        next_x, next_w = tl.load(x_scale_at + begin // _SCALE_BLOCK), tl.load(w_scale_at + begin // _SCALE_BLOCK)
    for k in range(begin, end, BLOCK_K):
        if FP4:
            x_KM = _load_rows(x, x_rows, columns, x_stride, k, M, BLOCK_K)
            w_NK = load_fp4(w, w_scale, w_rows, columns, w_groups, k, acc.shape[0], BLOCK_K)
        else:
            w_NK, x_KM = _load_tiles(x, w, x_rows, w_rows, columns, x_stride, k, M, acc.shape[0], BLOCK_K, TMA)
        if KIND == 0:
            factor_M = tl.max(tl.reshape(next_x * next_w, [M, ALIKE]), 1)
            group = tl.minimum(k + BLOCK_K, end - 1) // _SCALE_BLOCK
            next_x, next_w = tl.load(x_scale_at + group), tl.load(w_scale_at + group)
            acc += tl.dot(w_NK, x_KM) * factor_M[None, :]
        elif KIND == 1:
            acc = tl.dot(w_NK, x_KM, acc)
        elif KIND == 3:
            acc = tl.dot(w_NK, x_KM, acc, out_dtype=tl.int32)
        else:
            wide_NK = w_NK.to(tl.float32)
            if w_scale is not None and w_NK.dtype != tl.int8 and not FP4:
                wide_NK = wide_NK * tl.load(w_scale_at + k // _SCALE_BLOCK)
            acc = tl.dot(wide_NK, x_KM, acc, input_precision="ieee")
    return acc


@triton.jit
def _times_row_scales(sum_NM, x_scale, w_scale, x_rows, w_rows, x_groups):
    """fp32: the sums times the scales of their rows of int8 weights and, where there are any, of x."""
    row, rows = x_rows
    _, first_N, N = w_rows
    column_N = first_N + tl.arange(0, sum_NM.shape[0])
    y_NM = sum_NM.to(tl.float32) * tl.load(w_scale + column_N, mask=column_N < N, other=0.0)[:, None]
    if x_scale is not None:
        row_M = row + tl.minimum(tl.arange(0, sum_NM.shape[1]), rows - 1)
        y_NM *= tl.load(x_scale + row_M.to(tl.int64) * x_groups)[None, :]
    return y_NM


@triton.jit
def _scaled_product(
    operands,
    x_rows,
    w_rows,
    columns,
    strides,
    KIND: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TMA: tl.constexpr,
    THREADS: tl.constexpr,
):
    """fp32 [BLOCK_N, BLOCK_M]: W X^T."""
    _, x_scale, w, w_scale = operands
    _, x_groups, _, _ = strides
    sum_NM = tl.zeros([BLOCK_N, BLOCK_M], tl.int32 if KIND == 3 else tl.float32)
    if KIND == 4:
        sum_NM = fp4_product(sum_NM, operands, x_rows, w_rows, columns, strides, BLOCK_K, TMA)
    else:
        sum_NM = _product(sum_NM, operands, x_rows, w_rows, columns, strides, KIND, BLOCK_K, TMA, THREADS)
    if KIND == 3:
        return _times_row_scales(sum_NM, x_scale, w_scale, x_rows, w_rows, x_groups)
    else:
        if KIND == 2 and w.dtype.element_ty == tl.int8:
            sum_NM = _times_row_scales(sum_NM, None, w_scale, x_rows, w_rows, x_groups)
        return sum_NM


@triton.jit
def multiply_tile(
    operands,
    x_rows,
    w_tile,
    columns,
    strides,
    limit,
    KIND: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TMA: tl.constexpr,
    THREADS: tl.constexpr,
):
    """fp32 [BLOCK_N, BLOCK_M] of y = x W^T, or of silu(gate) * up if GATED, both cut to the limit.

    w_tile: (index of the matrix, first row of the tile within it, N). A matrix has N rows; 2N, gate then up, if GATED.
    """
    x, x_scale, w, w_scale = operands
    matrix, first_N, N = w_tile
    _, _, w_groups, scale_rows = strides
    w_row = matrix * (2 if GATED else 1) * N
    if w_scale is not None:
        w_scale += matrix.to(tl.int64) * scale_rows * w_groups
    gate, w_rows = (x, x_scale, w, w_scale), (w_row, first_N, N)
    y_NM = _scaled_product(gate, x_rows, w_rows, columns, strides, KIND, BLOCK_M, BLOCK_N, BLOCK_K, TMA, THREADS)
    if GATED:
        if w_scale is not None:
            w_scale += (scale_rows // 2) * w_groups
        up, w_rows = (x, x_scale, w, w_scale), (w_row + N, first_N, N)
        up_NM = _scaled_product(up, x_rows, w_rows, columns, strides, KIND, BLOCK_M, BLOCK_N, BLOCK_K, TMA, THREADS)
        y_NM = silu_times(y_NM, up_NM, limit)
    return y_NM
