"""The routed experts of a rank, one after another through cuBLAS: for many rows each, whose number the host knows.

Two streams: the down projections of some experts run beside the gate and up projections of the next ones. So the last
thread blocks of one product leave no SM idle, and an EP call that takes SMs from one product does not delay the other.

cuBLAS multiplies whole multiples of 16 e4m3 rows, but rows lie expert after expert without gaps, so up to 15 rows of
the following experts are multiplied too. Their wrong outputs are overwritten by their own expert's product: all down
projections run on one stream, in order.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from eprt.gpu import cublas_lt
from eprt.gpu.cublas_lt import BlockScaledProduct
from eprt.ops.cuda import cublas
from eprt.ops.cuda.fp4_matrix import fp4_matrix
from eprt.ops.cuda.quantize import quantize_rows, store_quantized
from eprt.ops.cuda.silu import silu_mul, silu_times
from eprt.ops.cuda.tiles import find_tile
from eprt.ops.known_rows import LEAST_ROWS, KnownRows
from eprt.ops.weight import BLOCK, Weight

_BATCH = 4  # experts whose SiLU is one kernel
_TILE_ROWS, _GROUPS = 32, 8


@dataclass(frozen=True)
class RowsOfExpert:
    """The rows of an expert that has any."""

    begin: int  # first row
    count: int  # rows
    place: int  # first row in padded memory
    room: int  # rows in padded memory; the first `count` are the expert's
    matrix: int  # index of its matrix


def is_faster(known: KnownRows | None, w13: Weight, w2: Weight, dtype: torch.dtype) -> bool:
    """Whether experts_one_by_one is faster than a grouped product. dtype: of outputs, and of rows that are not e4m3."""
    if known is None or known.mean_rows < LEAST_ROWS or dtype != torch.bfloat16 or not w13.data.is_cuda:
        return False
    return (w13.data.dtype == dtype or w13.is_fp4) or (
        cublas.can_multiply(w13, dtype) and cublas.can_multiply(w2, dtype) and cublas_lt.is_installed()
    )


def experts_one_by_one(
    x_RH: Tensor,
    recv_count_E: Tensor,
    w13: Weight,
    w2: Weight,
    out_RH: Tensor,
    scale_RG: Tensor | None,
    known: KnownRows,
    num_sms: int | None = None,
    limit: float | None = None,
) -> Tensor:
    """As grouped_experts, for bfloat16 outputs. known: recv_count_E and the experts' matrices, on the host.

    num_sms: SMs for each product of e4m3 by e4m3; default: all. Of two products side by side either has so many.
    """
    if w13.scale is None or w13.is_fp4:
        products = PlainProducts(x_RH, w13, w2, out_RH, limit)
    else:
        products = ScaledProducts(x_RH, scale_RG, recv_count_E, w13, w2, out_RH, known.counts, num_sms, limit)
    experts = rows_of_experts(known, products.PADDED_TO)
    main, side = torch.cuda.current_stream(), _side_stream(x_RH.device.index)
    for first in range(0, len(experts), _BATCH):
        batch = experts[first : first + _BATCH]
        products.up(batch)
        side.wait_stream(main)
        with torch.cuda.stream(side):
            products.down(batch)
    main.wait_stream(side)
    return out_RH


@functools.cache
def _side_stream(device: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def rows_of_experts(known: KnownRows, padded_to: int) -> list[RowsOfExpert]:
    """The experts that have rows."""
    experts, begin, place = [], 0, 0
    for count, matrix in zip(known.counts, known.matrices, strict=True):
        if count:
            room = _padded(count, padded_to)
            experts.append(RowsOfExpert(begin, count, place, room, matrix))
            begin, place = begin + count, place + room
    return experts


def _padded(rows: int, to: int) -> int:
    return -(-rows // to) * to


class PlainProducts:
    """bfloat16 times bfloat16, or times fp4 that became bfloat16 in memory of its own, as long as its product takes.

    Keeps memory that one stream writes and the other reads until the streams have met.
    """

    PADDED_TO = 1

    def __init__(self, x_RH: Tensor, w13: Weight, w2: Weight, out_RH: Tensor, limit: float | None = None):
        self.x_RH, self.out_RH, self.limit = x_RH, out_RH, limit
        self.w13, self.w2 = w13, w2
        self.gated: dict[int, Tensor] = {}  # silu(gate) * up, by the batch's first row

    def up(self, experts: Sequence[RowsOfExpert]) -> None:
        first, last = experts[0], experts[-1]
        y_RI2 = self.x_RH.new_empty(last.place + last.room - first.place, self.w13.shape[1])
        for e in experts:
            to, rows = e.place - first.place, self.x_RH[e.begin : e.begin + e.count]
            torch.mm(rows, self._matrix(self.w13, e).T, out=y_RI2[to : to + e.count])
        self.gated[first.begin] = silu_mul(y_RI2, self.limit)

    def down(self, experts: Sequence[RowsOfExpert]) -> None:
        first, h_RI = experts[0], self.gated[experts[0].begin]
        for e in experts:
            at, to = e.place - first.place, self.out_RH[e.begin : e.begin + e.count]
            torch.mm(h_RI[at : at + e.count], self._matrix(self.w2, e).T, out=to)

    def _matrix(self, w: Weight, expert: RowsOfExpert) -> Tensor:
        return fp4_matrix(w, expert.matrix) if w.is_fp4 else w.data[expert.matrix]


class ScaledProducts:
    """e4m3 times e4m3. Padded memory holds silu(gate) * up and, expert after expert, the scales [G, room] of both
    products' rows, as cuBLAS reads them."""

    PADDED_TO = cublas.PADDED_TO

    def __init__(
        self,
        x_RH: Tensor,
        scale_RG: Tensor | None,
        recv_count_E: Tensor,
        w13: Weight,
        w2: Weight,
        out_RH: Tensor,
        counts: Sequence[int],
        num_sms: int | None,
        limit: float | None = None,
    ):
        if scale_RG is None:
            x_RH, scale_RG = quantize_rows(x_RH)
        assert x_RH.is_contiguous() and out_RH.is_contiguous()  # up() and down() compute addresses
        (self.hidden, self.size), rooms = w2.shape[-2:], [_padded(count, self.PADDED_TO) for count in counts]
        self.x_RH, self.out_RH, self.count_E, self.limit = x_RH, out_RH, recv_count_E, limit
        self.x_scale = scale_columns(scale_RG, recv_count_E, rooms)
        self.h_PI = x_RH.new_empty(sum(rooms), self.size)
        self.h_scale = scale_RG.new_empty(sum(rooms) * (self.size // BLOCK))
        self.w13, self.w2 = Matrices.from_weight(w13, num_sms), Matrices.from_weight(w2, num_sms)

    def up(self, experts: Sequence[RowsOfExpert]) -> None:
        first, last, x_bytes, scale_bytes = experts[0], experts[-1], self.hidden, self.hidden // BLOCK * 4
        y_PI2 = self.out_RH.new_empty(last.place + last.room - first.place, 2 * self.size)
        for e in experts:
            if e.begin + e.room <= len(self.x_RH):
                x = self.x_RH.data_ptr() + e.begin * x_bytes
            else:  # padding may hold anything, but must not lie past the end of x
                x_PH = self.x_RH.new_empty(e.room, self.hidden)
                x_PH[: e.count] = self.x_RH[e.begin : e.begin + e.count]
                x = x_PH.data_ptr()
            y = y_PI2.data_ptr() + (e.place - first.place) * 4 * self.size
            self.w13.multiply(e.matrix, e.room, x, self.x_scale.data_ptr() + e.place * scale_bytes, y)
        silu_mul_quantize_padded(y_PI2, first.place, self.h_PI, self.h_scale, self.count_E, self.limit)

    def down(self, experts: Sequence[RowsOfExpert]) -> None:
        scale_bytes = self.size // BLOCK * 4
        for e in experts:
            to = self.out_RH[e.begin : e.begin + e.room]
            y_PH = to if len(to) == e.room else to.new_empty(e.room, self.hidden)
            h, scale = self.h_PI.data_ptr() + e.place * self.size, self.h_scale.data_ptr() + e.place * scale_bytes
            self.w2.multiply(e.matrix, e.room, h, scale, y_PH.data_ptr())
            if y_PH is not to:
                to.copy_(y_PH[: len(to)])


@dataclass(frozen=True)
class Matrices:
    """A stack of e4m3 matrices [n, k], by address."""

    product: BlockScaledProduct  # for matrices of this shape
    data: int  # address of the first matrix
    scale: int  # address of its scales
    data_bytes: int  # of a matrix
    scale_bytes: int  # of a matrix's scales
    num_sms: int | None  # SMs to compute on; None: all

    @staticmethod
    def from_weight(w: Weight, num_sms: int | None) -> "Matrices":
        assert w.scale is not None
        (n, k), device = w.shape[-2:], w.data.device.index
        return Matrices(
            _product(n, k, device), w.data.data_ptr(), w.scale.data_ptr(), n * k, w.scale[0].nbytes, num_sms
        )

    def multiply(self, which: int, rows: int, x: int, x_scale: int, out: int) -> None:
        data, scale = self.data + which * self.data_bytes, self.scale + which * self.scale_bytes
        stream = torch.cuda.current_stream().cuda_stream
        self.product(rows, x, x_scale, data, scale, out, stream, self.num_sms)


@functools.cache
def _product(n: int, k: int, device: int) -> BlockScaledProduct:
    return BlockScaledProduct(n, k)


@triton.jit
def _rooms(count_E, num_experts, EXPERTS: tl.constexpr, PADDED: tl.constexpr):
    """(the vector 0, 1, 2, ...; rows of each expert; the same, padded)"""
    expert = tl.arange(0, EXPERTS)
    count = tl.load(count_E + expert, mask=expert < num_experts, other=0)
    return expert, count, (count + PADDED - 1) // PADDED * PADDED


@triton.jit(do_not_specialize=["num_experts", "row_stride"])
def _scale_columns(
    out,
    scale,
    count_E,
    row_stride,
    num_experts,
    num_groups,
    EXPERTS: tl.constexpr,
    PADDED: tl.constexpr,
    TILE: tl.constexpr,
    GROUPS: tl.constexpr,
):
    expert, count, room = _rooms(count_E, num_experts, EXPERTS, PADDED)
    which, place, rows, first = find_tile(tl.program_id(0), room, expert, TILE)
    begin = tl.sum(tl.where(expert < which, count, 0), 0)
    filled = tl.sum(tl.where(expert == which, count, 0), 0)
    member, group = first + tl.arange(0, TILE)[:, None], tl.arange(0, GROUPS)[None, :]
    at = (begin + member).to(tl.int64) * row_stride + group
    value = tl.load(scale + at, mask=(member < filled) & (group < num_groups), other=0.0)
    to = place.to(tl.int64) * num_groups + group * rows + member
    tl.store(out + to, value, mask=(member < rows) & (group < num_groups))


def scale_columns(scale_RG: Tensor, recv_count_E: Tensor, rooms: Sequence[int]) -> Tensor:
    """fp32, flat: expert by expert its rows' scales [G, room], 0 for padding. rooms: padded counts."""
    num_groups = scale_RG.shape[1]
    out = scale_RG.new_empty(sum(rooms) * num_groups)
    tiles = sum(triton.cdiv(room, _TILE_ROWS) for room in rooms)
    _scale_columns[(tiles,)](
        out,
        scale_RG,
        recv_count_E,
        scale_RG.stride(0),
        len(rooms),
        num_groups,
        EXPERTS=triton.next_power_of_2(len(rooms)),
        PADDED=ScaledProducts.PADDED_TO,
        TILE=_TILE_ROWS,
        GROUPS=triton.next_power_of_2(num_groups),
    )
    return out


@triton.jit(do_not_specialize=["num_experts", "first_row"])
def _silu_mul_quantize_padded(
    data,
    scale,
    y,
    count_E,
    limit,
    num_experts,
    first_row,
    size,
    num_groups,
    EXPERTS: tl.constexpr,
    PADDED: tl.constexpr,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
):
    expert, _count, room = _rooms(count_E, num_experts, EXPERTS, PADDED)
    row = first_row + tl.program_id(0)
    _which, place, rows, member = find_tile(row // PADDED, room, expert, PADDED)
    member += row % PADDED
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    column = group[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    at = y + tl.program_id(0).to(tl.int64) * 2 * size + column
    gate = tl.load(at, mask=column < size, other=0.0).to(tl.float32)
    up = tl.load(at + size, mask=column < size, other=0.0).to(tl.float32)
    to = scale + place.to(tl.int64) * num_groups + member
    store_quantized(data, to, silu_times(gate, up, limit), row.to(tl.int64), group, column, size, num_groups, 0, rows)


def silu_mul_quantize_padded(
    y_PI2: Tensor,
    first_row: int,
    h_PI: Tensor,
    h_scale: Tensor,
    recv_count_E: Tensor,
    limit: float | None = None,
) -> None:
    """Computes silu(gate) * up, both cut to the limit, of y_PI2, the rows from first_row on of padded memory, in h_PI
    (e4m3) and h_scale."""
    size, num_experts = h_PI.shape[1], len(recv_count_E)
    groups = triton.cdiv(size, BLOCK)
    _silu_mul_quantize_padded[(len(y_PI2), triton.cdiv(groups, _GROUPS))](
        h_PI,
        h_scale,
        y_PI2,
        recv_count_E,
        limit,
        num_experts,
        first_row,
        size,
        groups,
        EXPERTS=triton.next_power_of_2(num_experts),
        PADDED=ScaledProducts.PADDED_TO,
        GROUPS=_GROUPS,
        SIZE=BLOCK,
    )
