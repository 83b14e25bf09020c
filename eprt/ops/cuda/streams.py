"""Hyper-connections on GPUs: two kernels make a sublayer's input and the mixture of the streams, one takes up its output.

The first multiplies rows by the projection, columns cut into splits where rows are few; the second adds the splits up,
makes the weights of them, and weighs the streams. All in fp32; products of bfloat16 streams by tensor cores, from three
tf32 products each. Knows nothing of sublayers.

X rows, M streams, K outputs of the projection, W columns.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from eprt.ops.streams import StreamProjection

_COLUMNS = 128  # multiplied at once
_LEAST = 256  # columns of a split
_PIECE = 512  # columns that are weighed at once
_PROGRAMS = 132  # that give every SM something to do


@triton.jit
def _project(
    part_SXK,
    x,
    fn,
    num_rows,
    width,
    num_outputs,
    share,
    ACCURATE: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """A split's part of each row's outputs and, behind them, of the sum of its squares."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    k, split = tl.arange(0, OUTPUTS), tl.program_id(1)
    end = tl.minimum(width, (split + 1) * share)
    acc, squares = tl.zeros([ROWS, OUTPUTS], tl.float32), tl.zeros([ROWS], tl.float32)
    precision: tl.constexpr = "ieee" if ACCURATE else "tf32x3"
    for first in range(split * share, end, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        inside = (row < num_rows)[:, None] & (column < end)[None, :]
        at = x + row.to(tl.int64)[:, None] * width + column[None, :]
        value = tl.load(at, mask=inside, other=0.0).to(tl.float32)
        known = (k < num_outputs)[:, None] & (column < end)[None, :]
        weight = tl.load(fn + k[:, None] * width + column[None, :], mask=known, other=0.0)
        acc = tl.dot(value, tl.trans(weight), acc, input_precision=precision)
        squares += tl.sum(value * value, 1)
    acc = tl.where((k == num_outputs)[None, :], squares[:, None], acc)
    to = part_SXK + (split * num_rows + row).to(tl.int64)[:, None] * OUTPUTS + k[None, :]
    tl.store(to, acc, mask=(row < num_rows)[:, None] & (k <= num_outputs)[None, :])


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _stochastic(comb, inside, num_iterations, eps):
    """The logits' softmax over each row, then its columns and rows divided by their sums in turns."""
    comb = tl.where(inside, comb, float("-inf"))
    comb = tl.where(inside, tl.exp(comb - tl.max(comb, 1)[:, None]), 0.0)
    comb = tl.where(inside, tl.div_rn(comb, tl.sum(comb, 1)[:, None] + tl.zeros_like(comb)) + eps, 0.0)
    for i in range(num_iterations):
        if i > 0:
            comb = tl.where(inside, comb / (tl.sum(comb, 1)[:, None] + eps), 0.0)
        comb = tl.where(inside, comb / (tl.sum(comb, 0)[None, :] + eps), 0.0)
    return comb


@triton.jit
def _mix(
    out_row,
    mixed,
    post,
    part_SXK,
    x,
    base,
    scale,
    num_rows,
    num_splits,
    num_streams,
    size,
    num_iterations,
    eps,
    norm_eps,
    share,
    HEAD: tl.constexpr,
    STREAMS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    SPLITS: tl.constexpr,
    PIECE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    s, m, width = tl.arange(0, SPLITS), tl.arange(0, STREAMS), num_streams * size
    part = part_SXK + (s * num_rows + row) * OUTPUTS
    has, there = s < num_splits, m < num_streams
    num_outputs = num_streams if HEAD else num_streams * (2 + num_streams)
    squares = tl.sum(tl.load(part + num_outputs, mask=has, other=0.0), 0)
    factor = 1.0 / tl.sqrt_rn(squares / width + norm_eps)
    mask = has[:, None] & there[None, :]
    pre = tl.sum(tl.load(part[:, None] + m[None, :], mask=mask, other=0.0), 0) * factor
    pre = _sigmoid(pre * tl.load(scale) + tl.load(base + m, mask=there, other=0.0)) + eps
    # One program has all weights as scalars: the columns that it weighs need no others' values.
    weights = ()
    for j in tl.static_range(STREAMS):
        weights = weights + (tl.sum(tl.where(m == j, pre, 0.0), 0),)
    if not HEAD:
        share_M = tl.sum(tl.load(part[:, None] + (num_streams + m)[None, :], mask=mask, other=0.0), 0) * factor
        share_M = share_M * tl.load(scale + 1) + tl.load(base + num_streams + m, mask=there, other=0.0)
        tl.store(post + row * num_streams + m, 2.0 * _sigmoid(share_M), mask=there & (tl.program_id(1) == 0))
        place, inside = m[:, None] * num_streams + m[None, :] + 2 * num_streams, there[:, None] & there[None, :]
        at, known = part[:, None, None] + place[None, :, :], has[:, None, None] & inside[None, :, :]
        comb = tl.sum(tl.load(at, mask=known, other=0.0), 0) * factor
        comb = comb * tl.load(scale + 2) + tl.load(base + place, mask=inside, other=0.0)
        comb = _stochastic(comb, inside, num_iterations, eps)
        for k in tl.static_range(STREAMS):
            for j in tl.static_range(STREAMS):
                one = (m == j)[:, None] & (m == k)[None, :]
                weights = weights + (tl.sum(tl.sum(tl.where(one, comb, 0.0), 1), 0),)
    begin = tl.program_id(1) * share
    for first in range(begin, tl.minimum(size, begin + share), PIECE):
        column = first + tl.arange(0, PIECE)
        known = column < size
        streams = ()
        for j in tl.static_range(STREAMS):
            at = x + row * width + j * size + column
            streams = streams + (tl.load(at, mask=known & (j < num_streams), other=0.0).to(tl.float32),)
        for k in tl.static_range(1 if HEAD else 1 + STREAMS):
            total = tl.zeros([PIECE], tl.float32)
            for j in tl.static_range(STREAMS):
                total = tl.fma(streams[j], weights[k * STREAMS + j], total)
            if k == 0:
                tl.store(out_row + row * size + column, total.to(out_row.dtype.element_ty), mask=known)
            else:
                to = mixed + row * width + (k - 1) * size + column
                tl.store(to, total, mask=known & (k <= num_streams))


@triton.jit
def _expand(out, mixed, post, y, num_streams, size, PIECE: tl.constexpr):
    stream = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * PIECE + tl.arange(0, PIECE)
    known, at = column < size, stream * size + column
    value = tl.load(y + stream // num_streams * size + column, mask=known, other=0.0).to(tl.float32)
    total = tl.fma(value, tl.load(post + stream), tl.load(mixed + at, mask=known, other=0.0))
    tl.store(out + at, total.to(out.dtype.element_ty), mask=known)


def mix_streams(x_TMH: Tensor, projection: StreamProjection) -> tuple[Tensor, Tensor, Tensor]:
    """As eprt.ops.streams.mix_streams."""
    (T, M, H), fp32 = x_TMH.shape, {"dtype": torch.float32}
    mixed_TMH, post_TM = x_TMH.new_empty(T, M, H, **fp32), x_TMH.new_empty(T, M, **fp32)
    return _launch(x_TMH, projection, 2 + M, mixed_TMH, post_TM), mixed_TMH, post_TM


def collapse_streams(x_TMH: Tensor, projection: StreamProjection) -> Tensor:
    """As eprt.ops.streams.collapse_streams."""
    return _launch(x_TMH, projection, 1, None, None)


def expand_streams(mixed_TMH: Tensor, post_TM: Tensor, y_TH: Tensor) -> Tensor:
    """As eprt.ops.streams.expand_streams."""
    T, M, H = mixed_TMH.shape
    out_TMH = y_TH.new_empty(T, M, H)
    if T:
        operands = (each.contiguous() for each in (mixed_TMH, post_TM, y_TH))
        piece = min(1024, triton.next_power_of_2(H))
        _expand[(T * M, triton.cdiv(H, piece))](out_TMH, *operands, M, H, PIECE=piece)
    return out_TMH


def _launch(
    x_TMH: Tensor,
    p: StreamProjection,
    outputs_per_stream: int,
    mixed_TMH: Tensor | None,
    post_TM: Tensor | None,
) -> Tensor:
    x_TMH = x_TMH.contiguous()
    T, M, H = x_TMH.shape
    outputs, width, row_TH = outputs_per_stream * M, M * H, x_TMH.new_empty(T, H)
    if p.fn_KW.shape != (outputs, width):
        raise ValueError(f"fn has shape {tuple(p.fn_KW.shape)}, must be {(outputs, width)}")
    if not T:
        return row_TH
    rows = 64 if T > 64 else 16
    tiles, block = triton.cdiv(T, rows), max(16, triton.next_power_of_2(outputs + 1))
    share = _share(width, tiles, _LEAST)
    splits = triton.cdiv(width, share)
    part_SXK = torch.empty(splits, T, block, dtype=torch.float32, device=x_TMH.device)
    accurate = x_TMH.dtype == torch.float32
    _project[(tiles, splits)](
        part_SXK,
        x_TMH,
        p.fn_KW,
        T,
        width,
        outputs,
        share,
        ACCURATE=accurate,
        ROWS=rows,
        OUTPUTS=block,
        COLUMNS=32 if accurate else _COLUMNS,
        num_warps=4,
        num_stages=3,
    )
    piece = min(_PIECE, triton.next_power_of_2(H))
    columns = _share(H, T, piece)
    _mix[(T, triton.cdiv(H, columns))](
        row_TH,
        mixed_TMH,
        post_TM,
        part_SXK,
        x_TMH,
        p.base_K,
        p.scale,
        T,
        splits,
        M,
        H,
        p.num_iterations,
        p.eps,
        p.norm_eps,
        columns,
        HEAD=mixed_TMH is None,
        STREAMS=triton.next_power_of_2(M),
        OUTPUTS=block,
        SPLITS=triton.next_power_of_2(splits),
        PIECE=piece,
        num_warps=4,
    )
    return row_TH


def _share(size: int, programs: int, least: int) -> int:
    """Columns of one program, a multiple of `least`, where `programs` would have all columns otherwise."""
    cuts = max(1, min(_PROGRAMS // programs, triton.cdiv(size, least)))
    return triton.cdiv(triton.cdiv(size, cuts), least) * least
