"""DeepSeek-V4's rows as they are stored, and rows that are normalised, turned, stored and put into pages in one kernel.

Tiles are those of turned_rows: [HEADS, GROUPS, 64], here of one head. Formats: plain; EntryFormat's and IndexFormat's
bytes. A scale is found in whole numbers: no division rounds it. Knows nothing of who owns pages.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from eprt.ops.cuda.paged_rows import row_offset
from eprt.ops.cuda.turned_rows import NUM_WARPS, checked_half, columns, groups_of, turned_tile
from eprt.ops.elementwise import Rotation
from eprt.ops.entry_format import EntryFormat
from eprt.ops.turned_rows import RowNorm

_SMALLEST_BITS = tl.constexpr((127 - 40) << 23)  # of kv_format.SMALLEST_SCALE


@triton.jit
def scale_bits(most, BELOW: tl.constexpr, EXPONENT: tl.constexpr):
    """The bits of the smallest power of 2 that is at least most / largest.

    largest: (1 + m / 2^23) * 2^EXPONENT, with BELOW = 2^23 - 1 - m: what carries a larger fraction over.
    """
    bits = most.to(tl.int32, bitcast=True)
    return tl.maximum(((bits + BELOW) & 0x7F800000) - (EXPONENT << 23), _SMALLEST_BITS)


@triton.jit
def store_row(to, value, column, stored, FP8: tl.constexpr, GROUPS: tl.constexpr):
    """Stores a tile [1, GROUPS, 64] in EntryFormat's bytes if FP8, or in the dtype of `to`.

    stored: (values, of them rotated, bytes of an entry).
    """
    size, turning, width = stored
    if FP8:
        plain, group = size - turning, tl.arange(0, GROUPS)[None, :]
        most = tl.max(tl.where(column < plain, tl.abs(value), 0.0), 2)
        bits = scale_bits(most, 0x1FFFFF, 8)
        factor = (0x7F000000 - bits).to(tl.float32, bitcast=True)[:, :, None]  # 1 / scale
        code = (value * factor).to(tl.float8e4nv)
        tl.store(to.to(tl.pointer_type(tl.float8e4nv)) + column, code, mask=column < plain)
        rope_at = (to + plain).to(tl.pointer_type(tl.bfloat16)) + (column - plain)
        tl.store(rope_at, value.to(tl.bfloat16), mask=(column >= plain) & (column < size))
        scale_at, num_scales = plain + 2 * turning, (plain + 63) // 64
        tl.store(to + scale_at + group, (bits >> 23).to(tl.uint8), mask=group < num_scales)
        pad = scale_at + num_scales + tl.arange(0, 8)
        tl.store(to + pad, tl.zeros([8], tl.uint8), mask=pad < width)
    else:
        tl.store(to + column, value.to(to.dtype.element_ty), mask=column < size)


@triton.jit
def _store_rows(
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
    turning,
    half,
    width,
    eps,
    NORM: tl.constexpr,
    TURN: tl.constexpr,
    FP8: tl.constexpr,
    GROUPS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = row
    if slot_X is not None:
        slot = tl.load(slot_X + row).to(tl.int64)
    if slot >= 0:
        column, head = columns(GROUPS), tl.arange(0, 1)[:, None, None]
        at = x + row * row_stride + head * size
        if TURN:
            angles = cos_sin + tl.load(position_X + row).to(tl.int64) * 2 * half
            value = turned_tile(at, head < 1, column, weight, angles, size, half, eps, NORM, False)
            value = value.to(x.dtype.element_ty).to(tl.float32)
        else:
            value = tl.load(at + column, mask=column < size, other=0.0).to(tl.float32)
        to = pages + row_offset(slot, page_rows, page_stride, place_stride)
        store_row(to, value, column, (size, turning, width), FP8, GROUPS)


def encode_entries(values_XD: Tensor, entry: EntryFormat) -> Tensor:
    """EntryFormat.encode on GPUs."""
    entries_XW = torch.empty(len(values_XD), entry.width, dtype=entry.dtype, device=values_XD.device)
    _store(entries_XW.unsqueeze(1), None, values_XD, entry, None, None)
    return entries_XW


def insert_rows(
    pages_PEW: Tensor, slot_X: Tensor, x_XD: Tensor, entry: EntryFormat, rotation: Rotation, norm: RowNorm | None = None
) -> None:
    """As eprt.ops.entry_rows.insert_rows, in one kernel. Slots and positions are not checked."""
    _store(pages_PEW, slot_X, x_XD, entry, rotation, norm)


def _store(
    pages_PEW: Tensor,
    slot_X: Tensor | None,
    x_XD: Tensor,
    entry: EntryFormat,
    rotation: Rotation | None,
    norm: RowNorm | None,
) -> None:
    (X, D), x_XD = x_XD.shape, x_XD if x_XD.stride(1) == 1 else x_XD.contiguous()
    if pages_PEW.dtype != entry.dtype or pages_PEW.shape[2] != entry.width or pages_PEW.stride(2) != 1:
        raise ValueError(
            f"pages are {pages_PEW.dtype} {tuple(pages_PEW.shape)}, must be {entry.dtype} of {entry.width}"
        )
    if not X:
        return
    _store_rows[(X,)](
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
        entry.rope_size,
        0 if rotation is None else checked_half(rotation, D),
        entry.width,
        0.0 if norm is None else norm.eps,
        NORM=norm is not None,
        TURN=rotation is not None,
        FP8=entry.is_fp8,
        GROUPS=groups_of(D),
        num_warps=NUM_WARPS,
    )
