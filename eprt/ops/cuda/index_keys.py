"""The rows of DeepSeek-V4's indexer: queries and keys turned and transformed, keys encoded and put into pages.

One kernel for queries, one for keys. Rows are turned as turned_rows does it; the transform's sums are fp32. Formats:
IndexFormat's. Knows nothing of scores.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from eprt.ops.cuda.entry_store import scale_bits
from eprt.ops.cuda.index_rows import hadamard_matrix
from eprt.ops.cuda.paged_rows import row_offset
from eprt.ops.cuda.turned_rows import NUM_WARPS, checked_half, columns, groups_of, turned_tile
from eprt.ops.elementwise import Rotation
from eprt.ops.index_format import IndexFormat
from eprt.ops.turned_rows import RowNorm

_ROWS = 16  # of a product by tensor cores, at least
_MATRIX = tl.constexpr(128)  # rows of the largest matrix of a transform, which lies in shared memory


@triton.jit
def _transformed_heads(value, size, HEADS: tl.constexpr, GROUPS: tl.constexpr):
    """The Hadamard transform of each of [HEADS, GROUPS, 64], unscaled, in fp32: of pieces that fit a matrix, by tensor
    cores, and then across the pieces."""
    PIECE: tl.constexpr = min(GROUPS * 64, _MATRIX)
    PIECES: tl.constexpr = GROUPS * 64 // PIECE
    i, piece = tl.arange(0, PIECE), tl.arange(0, PIECES)
    matrix = hadamard_matrix(i[:, None], i[None, :], size).to(value.dtype)
    value = tl.dot(tl.reshape(value, [HEADS * PIECES, PIECE]), matrix, input_precision="ieee")
    if PIECES > 1:
        signs = hadamard_matrix(piece[:, None], piece[None, :], PIECES)
        value = tl.reshape(value, [HEADS, 1, PIECES, PIECE])
        value = tl.sum(value * signs[None, :, :, None], 2)
    return tl.reshape(value, [HEADS, GROUPS, 64])


@triton.jit
def _turn_queries(
    out,
    x,
    cos_sin,
    position_X,
    row_stride,
    head_stride,
    num_heads,
    size,
    half,
    factor,
    TRANSFORM: tl.constexpr,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None, None]
    column, present = columns(GROUPS), head < num_heads
    at, inside = x + row * row_stride + head * head_stride, present & (column < size)
    if cos_sin is not None:
        angles = cos_sin + tl.load(position_X + row).to(tl.int64) * 2 * half
        value = turned_tile(at, present, column, None, angles, size, half, 0.0, False, False)
    else:
        value = tl.load(at + column, mask=inside, other=0.0).to(tl.float32)
    to = out + (row * num_heads + head) * size + column
    value = value.to(out.dtype.element_ty)
    if TRANSFORM:
        value = _transformed_heads(value, size, HEADS, GROUPS) * factor
        value = value.to(out.dtype.element_ty)
    tl.store(to, value, mask=inside)


@triton.jit
def _transformed(value, GROUPS: tl.constexpr):
    """The Hadamard transform of fp32 [GROUPS * 64], unscaled: of the places in groups of 8, of the groups of 8 in those
    of 64, and of these, each by a small matrix. Behind fewer values that exist come repetitions of their transform."""
    i = tl.arange(0, 8)
    matrix = hadamard_matrix(i[:, None], i[None, :], 8)
    value = tl.reshape(value, [GROUPS * 8, 8])
    value = tl.sum(value[:, None, :] * matrix[None, :, :], 2)
    value = tl.reshape(value, [GROUPS, 8, 8])
    value = tl.sum(value[:, None, :, :] * matrix[None, :, :, None], 2)
    if GROUPS > 1:
        g = tl.arange(0, GROUPS)
        matrix = hadamard_matrix(g[:, None], g[None, :], GROUPS)
        value = tl.sum(tl.reshape(value, [1, GROUPS, 64]) * matrix[:, :, None], 1)
    return tl.reshape(value, [GROUPS * 64])


@triton.jit
def _fp4_code(value):
    """e2m1 to the nearest, ties to the even code."""
    most = tl.abs(value)
    code = (most > 0.25).to(tl.int32) + (most >= 0.75).to(tl.int32) + (most > 1.25).to(tl.int32)
    code += (most >= 1.75).to(tl.int32) + (most > 2.5).to(tl.int32) + (most >= 3.5).to(tl.int32)
    return code + (most > 5.0).to(tl.int32) + 8 * (value < 0.0).to(tl.int32)


@triton.jit
def _store_key(to, value, size, width, FP8: tl.constexpr, FP4: tl.constexpr, SIZE: tl.constexpr):
    """value: fp32 [SIZE], of which `size` exist and the others are 0."""
    i = tl.arange(0, SIZE)
    if FP4:
        GROUPS: tl.constexpr = SIZE // 32
        even, odd = tl.split(tl.reshape(value, [GROUPS, 16, 2]))
        group = tl.arange(0, GROUPS)
        most = tl.max(tl.maximum(tl.abs(even), tl.abs(odd)), 1)
        bits = scale_bits(most, 0x3FFFFF, 2)
        factor = (0x7F000000 - bits).to(tl.float32, bitcast=True)[:, None]
        code = _fp4_code(even * factor) | (_fp4_code(odd * factor) << 4)
        place = group[:, None] * 16 + tl.arange(0, 16)[None, :]
        tl.store(to + place, code.to(tl.uint8), mask=place < size // 2)
        num_scales = (size + 31) // 32
        tl.store(to + size // 2 + group, (bits >> 23).to(tl.uint8), mask=group < num_scales)
        pad = size // 2 + num_scales + tl.arange(0, 4)
        tl.store(to + pad, tl.zeros([4], tl.uint8), mask=pad < width)
    elif FP8:
        bits = scale_bits(tl.max(tl.abs(value), 0), 0x1FFFFF, 8)
        code = (value * (0x7F000000 - bits).to(tl.float32, bitcast=True)).to(tl.float8e4nv)
        tl.store(to.to(tl.pointer_type(tl.float8e4nv)) + i, code, mask=i < size)
        tl.store((to + size).to(tl.pointer_type(tl.int32)), bits)
    else:
        tl.store(to + i, value.to(to.dtype.element_ty), mask=i < size)


@triton.jit
def _store_keys(
    pages,
    slot_X,
    x,
    weight,
    cos_sin,
    position_X,
    row_stride,
    page_rows,
    page_stride,
    place_stride,
    size,
    half,
    width,
    eps,
    factor,
    NORM: tl.constexpr,
    TURN: tl.constexpr,
    TRANSFORM: tl.constexpr,
    FP8: tl.constexpr,
    FP4: tl.constexpr,
    GROUPS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = row
    if slot_X is not None:
        slot = tl.load(slot_X + row).to(tl.int64)
    if slot >= 0:
        SIZE: tl.constexpr = GROUPS * 64
        column, head = columns(GROUPS), tl.arange(0, 1)[:, None, None]
        at, i = x + row * row_stride + head * size, tl.arange(0, SIZE)
        if TURN:
            angles = cos_sin + tl.load(position_X + row).to(tl.int64) * 2 * half
            value = turned_tile(at, head < 1, column, weight, angles, size, half, eps, NORM, False)
            value = value.to(x.dtype.element_ty).to(tl.float32)
        else:
            value = tl.load(at + column, mask=column < size, other=0.0).to(tl.float32)
        value = tl.reshape(value, [SIZE])
        if TRANSFORM:
            value = (_transformed(value, GROUPS) * factor).to(x.dtype.element_ty).to(tl.float32)
            value = tl.where(i < size, value, 0.0)
        to = pages + row_offset(slot, page_rows, page_stride, place_stride)
        _store_key(to, value, size, width, FP8, FP4, SIZE)


def as_cached(x_XND: Tensor, cache_dtype: torch.dtype) -> Tensor:
    """As eprt.ops.indexer.as_cached."""
    return x_XND if cache_dtype != torch.uint8 else _launch_queries(x_XND, None, True)


def turned_queries(query_XND: Tensor, rotation: Rotation, cache_dtype: torch.dtype) -> Tensor:
    """As eprt.ops.entry_rows.turned_queries. Positions are not checked."""
    return _launch_queries(query_XND, rotation, cache_dtype == torch.uint8)


def _launch_queries(x_XND: Tensor, rotation: Rotation | None, transform: bool) -> Tensor:
    x_XND = x_XND if x_XND.stride(2) == 1 else x_XND.contiguous()
    (X, N, D), out_XND = x_XND.shape, x_XND.new_empty(x_XND.shape)
    groups = groups_of(D)
    heads = max(1, _ROWS // max(1, groups * 64 // _MATRIX.value)) if transform else _ROWS
    if x_XND.numel():
        _turn_queries[(X, triton.cdiv(N, heads))](
            out_XND,
            x_XND,
            None if rotation is None else rotation.cos_sin_PR,
            None if rotation is None else rotation.position_T,
            *x_XND.stride()[:2],
            N,
            D,
            0 if rotation is None else checked_half(rotation, D),
            D**-0.5,
            TRANSFORM=transform,
            HEADS=heads,
            GROUPS=groups,
            num_warps=NUM_WARPS,
        )
    return out_XND


def encode_keys(key_XD: Tensor, index: IndexFormat) -> Tensor:
    """IndexFormat.encode on GPUs."""
    keys_XW = torch.empty(len(key_XD), index.width, dtype=index.dtype, device=key_XD.device)
    _store(keys_XW.unsqueeze(1), None, key_XD, index, None, None)
    return keys_XW


def insert_keys(
    pages_PEW: Tensor, slot_X: Tensor, x_XD: Tensor, index: IndexFormat, rotation: Rotation, norm: RowNorm | None = None
) -> None:
    """As eprt.ops.entry_rows.insert_keys, in one kernel. Slots and positions are not checked."""
    _store(pages_PEW, slot_X, x_XD, index, rotation, norm)


def _store(
    pages_PEW: Tensor,
    slot_X: Tensor | None,
    x_XD: Tensor,
    index: IndexFormat,
    rotation: Rotation | None,
    norm: RowNorm | None,
) -> None:
    (X, D), x_XD = x_XD.shape, x_XD if x_XD.stride(1) == 1 else x_XD.contiguous()
    if pages_PEW.dtype != index.dtype or pages_PEW.shape[2] != index.width or pages_PEW.stride(2) != 1:
        raise ValueError(
            f"pages are {pages_PEW.dtype} {tuple(pages_PEW.shape)}, must be {index.dtype} of {index.width}"
        )
    if not X:
        return
    _store_keys[(X,)](
        pages_PEW,
        slot_X,
        x_XD,
        None if norm is None else norm.weight_D,
        None if rotation is None else rotation.cos_sin_PR,
        None if rotation is None else rotation.position_T,
        x_XD.stride(0),
        pages_PEW.shape[1],
        *pages_PEW.stride()[:2],
        D,
        0 if rotation is None else checked_half(rotation, D),
        index.width,
        0.0 if norm is None else norm.eps,
        D**-0.5,
        NORM=norm is not None,
        TURN=rotation is not None,
        TRANSFORM=rotation is not None and index.is_transformed,
        FP8=index.is_fp8,
        FP4=index.is_fp4,
        GROUPS=groups_of(D),
        num_warps=NUM_WARPS,
    )
