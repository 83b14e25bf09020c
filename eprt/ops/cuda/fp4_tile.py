"""fp4 weights inside a product: e2m1 and e8m0 become bfloat16, which holds their products exactly, in registers.

Four values lie in 16 bits, and a register has two such words of one row. So each value of a word is a column of another
product, and x is given in planes (planes.py): plane j has the columns 4 i + j. No value ever changes its register.

What is written into the bits of a bfloat16 is the value times 2^-126: sign, and two bits of exponent and one of
mantissa where those of bfloat16 begin; 0 and 0.5 are subnormal in both formats. One multiplication takes the scale and
2^94; the sum is multiplied by the rest, 2^32 (GPU_FP4_SCALES in ops/weight.py: for which scales no bit is lost).
Knows nothing of which tiles there are.
"""

import triton
import triton.language as tl

from eprt.ops.weight import FP4_BLOCK

PLANES = 4
_PLANES = tl.constexpr(PLANES)
_BLOCK_COLUMNS = tl.constexpr(FP4_BLOCK)
_WORDS = tl.constexpr(FP4_BLOCK // PLANES)  # of 16 bits, under one scale
_SCALE_EXPONENT = tl.constexpr(94)
_REST = tl.constexpr(2.0**32)
_ASSEMBLED = tl.constexpr(not triton.knobs.runtime.interpret)  # Triton's interpreter has no assembly
# $4: two words; $5: their factors. Of each plane: sign and magnitude to their places, times the factor.
_WIDEN = tl.constexpr(
    """{
    .reg .b32 sign, value, none;
    mov.b32 none, 0x80008000;
    shl.b32 sign, $4, 12;
    and.b32 sign, sign, 0x80008000;
    shl.b32 value, $4, 6;
    lop3.b32 value, value, 0x01C001C0, sign, 0xEA;
    fma.rn.bf16x2 $0, value, $5, none;
    shl.b32 sign, $4, 8;
    and.b32 sign, sign, 0x80008000;
    shl.b32 value, $4, 2;
    lop3.b32 value, value, 0x01C001C0, sign, 0xEA;
    fma.rn.bf16x2 $1, value, $5, none;
    shl.b32 sign, $4, 4;
    and.b32 sign, sign, 0x80008000;
    shr.b32 value, $4, 2;
    lop3.b32 value, value, 0x01C001C0, sign, 0xEA;
    fma.rn.bf16x2 $2, value, $5, none;
    and.b32 sign, $4, 0x80008000;
    shr.b32 value, $4, 6;
    lop3.b32 value, value, 0x01C001C0, sign, 0xEA;
    fma.rn.bf16x2 $3, value, $5, none;
    }"""
)


@triton.jit
def fp4_value(code):
    """fp32 of the lowest four bits of each element."""
    code = code.to(tl.int32)
    bits = (code & 8) << 28 | (code & 7) << 22
    return bits.to(tl.float32, bitcast=True) * 2.0**126


@triton.jit
def two_to(exponent):
    """fp32 2^(exponent - 127), exponent: uint8."""
    exponent = exponent.to(tl.int32)
    return tl.where(exponent == 0, 1 << 22, exponent << 23).to(tl.float32, bitcast=True)


@triton.jit
def _planes_of(word, exponent):
    """Four bfloat16 tiles like `word` (int16), of the values times 2^-32. exponent: uint8, of each word."""
    if _ASSEMBLED:
        factor = ((exponent.to(tl.int32) + _SCALE_EXPONENT) << 7).to(tl.int16).to(tl.bfloat16, bitcast=True)
        types: tl.constexpr = (tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16)
        return tl.inline_asm_elementwise(_WIDEN, "=r,=r,=r,=r,r,r", [word, factor], types, is_pure=True, pack=2)
    else:
        factor = two_to(exponent) / _REST
        first = (fp4_value(word) * factor).to(tl.bfloat16)
        second = (fp4_value(word >> 4) * factor).to(tl.bfloat16)
        third = (fp4_value(word >> 8) * factor).to(tl.bfloat16)
        return first, second, third, (fp4_value(word >> 12) * factor).to(tl.bfloat16)


@triton.jit
def _load_words(w, w_row, first_N, N, i, end, row_words, TILE_N: tl.constexpr, TILE: tl.constexpr, TMA: tl.constexpr):
    """int16 [TILE_N, TILE]; 0 past the row's end."""
    if TMA:
        return w.load([w_row + first_N, i])
    else:
        row_N, column = first_N + tl.arange(0, TILE_N), i + tl.arange(0, TILE)
        at = w + (w_row + row_N)[:, None].to(tl.int64) * row_words + column[None, :]
        return tl.load(at, mask=(row_N < N)[:, None] & (column < end)[None, :], other=0)


@triton.jit
def _load_plane(x, row, rows, i, end, x_stride, M: tl.constexpr, TILE: tl.constexpr, TMA: tl.constexpr):
    """bfloat16 [TILE, M]; 0 past the row's end."""
    if TMA:
        return tl.trans(x.load([row, i]))
    else:
        row_M, column = row + tl.minimum(tl.arange(0, M), rows - 1), i + tl.arange(0, TILE)
        at = x + row_M[None, :].to(tl.int64) * x_stride + column[:, None]
        return tl.load(at, mask=(column < end)[:, None], other=0.0)


@triton.jit
def fp4_product(
    acc,
    operands,
    x_rows,
    w_rows,
    columns,
    strides,
    BLOCK_K: tl.constexpr,
    TMA: tl.constexpr,
):
    """acc [N tile, M tile] + W X^T, arguments as in tile_product.py. x is in planes: strides are (of their rows, rows
    of a plane, ..); w, of int16, has 4 values to an element."""
    x, _, w, w_scale = operands
    begin, end, K = columns
    x_stride, plane_rows, w_groups, _ = strides
    row, rows = x_rows
    w_row, first_N, N = w_rows
    TILE_N: tl.constexpr = acc.shape[0]
    M: tl.constexpr = acc.shape[1]
    TILE: tl.constexpr = BLOCK_K // _PLANES
    GROUPS: tl.constexpr = BLOCK_K // _BLOCK_COLUMNS
    last = end // _PLANES
    column_N = first_N + tl.arange(0, TILE_N)
    scale_row = w_scale + column_N[:, None] * w_groups
    for i in range(begin // _PLANES, last, TILE):
        word = _load_words(w, w_row, first_N, N, i, last, K // _PLANES, TILE_N, TILE, TMA)
        group = i // _WORDS + tl.arange(0, GROUPS)
        inside = (column_N < N)[:, None] & (group < w_groups)[None, :]
        exponent = tl.load(scale_row + group[None, :], mask=inside, other=0)
        spread = tl.broadcast_to(exponent[:, :, None], [TILE_N, GROUPS, _WORDS])
        w0, w1, w2, w3 = _planes_of(word, tl.reshape(spread, [TILE_N, TILE]))
        acc = tl.dot(w0, _load_plane(x, row, rows, i, last, x_stride, M, TILE, TMA), acc)
        acc = tl.dot(w1, _load_plane(x, row + plane_rows, rows, i, last, x_stride, M, TILE, TMA), acc)
        acc = tl.dot(w2, _load_plane(x, row + 2 * plane_rows, rows, i, last, x_stride, M, TILE, TMA), acc)
        acc = tl.dot(w3, _load_plane(x, row + 3 * plane_rows, rows, i, last, x_stride, M, TILE, TMA), acc)
    return acc * _REST


@triton.jit
def load_fp4(w, w_scale, w_rows, columns, w_groups, k, TILE_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """fp32 [TILE_N, BLOCK_K] of the columns from k on; 0 past their end. w: uint8, two values to an element."""
    w_row, first_N, N = w_rows
    _, end, K = columns
    column, column_N = k + tl.arange(0, BLOCK_K), first_N + tl.arange(0, TILE_N)
    inside = (column_N < N)[:, None] & (column < end)[None, :]
    w_at = w + (w_row + column_N)[:, None].to(tl.int64) * (K // 2) + column[None, :] // 2
    code = tl.load(w_at, mask=inside, other=0).to(tl.int32) >> column[None, :] % 2 * 4
    scale_at = w_scale + column_N[:, None].to(tl.int64) * w_groups + column[None, :] // _BLOCK_COLUMNS
    return fp4_value(code) * two_to(tl.load(scale_at, mask=inside, other=0))
