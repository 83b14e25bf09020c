"""A norm and the rotation of a row's last values: one program per token and some of its heads, in fp32.

Rows lie in registers as [heads, groups, 64], the tiles that entries are stored from, so that what normalises, turns and
stores in one kernel adds up in the same order. Knows nothing of what the rows are.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from eprt.ops.elementwise import Rotation
from eprt.ops.turned_rows import RowNorm

GROUP = 64  # values of a group
NUM_WARPS = 4
_VALUES = 4096  # of a program, at most


@triton.jit
def columns(GROUPS: tl.constexpr):
    """[1, GROUPS, 64]: the columns of a tile."""
    group, place = tl.arange(0, GROUPS)[None, :, None], tl.arange(0, 64)[None, None, :]
    return group * 64 + place


@triton.jit
def turned_angles(angles, column, size, half, BACKWARDS: tl.constexpr):
    """(cos, sin with the sign that a column's partner has) of each column; 1 and 0 of those that are not rotated."""
    place = column - (size - 2 * half)
    turns = (place >= 0) & (column < size)
    cos = tl.load(angles + place // 2, mask=turns, other=1.0)
    sin = tl.load(angles + half + place // 2, mask=turns, other=0.0)
    negative = (place % 2 == 0) != BACKWARDS
    return cos, tl.where(negative, -sin, sin), turns


@triton.jit
def turned_tile(
    row,
    present,
    column,
    weight,
    angles,
    size,
    half,
    eps,
    NORM: tl.constexpr,
    BACKWARDS: tl.constexpr,
):
    """fp32 [HEADS, GROUPS, 64]: rows normalised, rounded to their dtype, and rotated.

    row: pointers [HEADS, 1, 1]. present: which of them there are, likewise.
    """
    inside = present & (column < size)
    cos, sin, turns = turned_angles(angles, column, size, half, BACKWARDS)
    begin = size - 2 * half
    partner = tl.where(turns, begin + ((column - begin) ^ 1), column)
    value = tl.load(row + column, mask=inside, other=0.0).to(tl.float32)
    other = tl.load(row + partner, mask=inside & turns, other=0.0).to(tl.float32)
    if NORM:
        mean = tl.sum(tl.sum(value * value, 2), 1) / size
        factor = (1.0 / tl.sqrt_rn(mean + eps))[:, None, None]
        value, other = value * factor, other * factor
        if weight is not None:
            value *= tl.load(weight + column, mask=column < size, other=0.0).to(tl.float32)
            other *= tl.load(weight + partner, mask=turns, other=0.0).to(tl.float32)
        value = value.to(row.dtype.element_ty).to(tl.float32)
        other = other.to(row.dtype.element_ty).to(tl.float32)
    return tl.where(turns, tl.fma(value, cos, other * sin), value)


@triton.jit
def _turn_rows(
    out,
    x,
    weight,
    cos_sin,
    position_T,
    token_stride,
    head_stride,
    num_heads,
    size,
    half,
    eps,
    NORM: tl.constexpr,
    BACKWARDS: tl.constexpr,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None, None]
    column, present = columns(GROUPS), head < num_heads
    angles = cos_sin + tl.load(position_T + token).to(tl.int64) * 2 * half
    row = x + token * token_stride + head * head_stride
    value = turned_tile(row, present, column, weight, angles, size, half, eps, NORM, BACKWARDS)
    to = out + (token * num_heads + head) * size
    tl.store(to + column, value.to(out.dtype.element_ty), mask=present & (column < size))


def turn_rows(
    x_TND: Tensor,
    rotation: Rotation,
    norm: RowNorm | None = None,
    backwards: bool = False,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """As eprt.ops.turned_rows.turn_rows. Positions are not checked."""
    T, N, D = x_TND.shape
    out_TND = x_TND.new_empty(T, N, D, dtype=dtype or x_TND.dtype)
    groups = groups_of(D)
    heads = min(triton.next_power_of_2(N), max(1, _VALUES // (groups * GROUP)))
    if x_TND.numel():
        _turn_rows[(T, triton.cdiv(N, heads))](
            out_TND,
            x_TND,
            None if norm is None else norm.weight_D,
            rotation.cos_sin_PR,
            rotation.position_T,
            *x_TND.stride()[:2],
            N,
            D,
            checked_half(rotation, D),
            0.0 if norm is None else norm.eps,
            NORM=norm is not None,
            BACKWARDS=backwards,
            HEADS=heads,
            GROUPS=groups,
            num_warps=NUM_WARPS,
        )
    return out_TND


def groups_of(size: int) -> int:
    """Of a tile that holds so many columns."""
    return triton.next_power_of_2(triton.cdiv(size, GROUP))


def checked_half(rotation: Rotation, size: int) -> int:
    """Pairs that are rotated. ValueError unless neighbours are, and no more than there are."""
    turning = rotation.cos_sin_PR.shape[1]
    if not rotation.interleaved or turning % 2 or turning > size:
        raise ValueError(f"{turning} of {size} values to be rotated: must be an even number of interleaved ones")
    return turning // 2
