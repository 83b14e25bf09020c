"""Hyper-connections on GPUs: two kernels make a sublayer's input and the streams' mixture, one takes up its output.

The first multiplies rows by the projection, columns cut into splits where rows are few; the second adds the splits up,
makes the weights of them, and weighs the streams. All in fp32; products of bfloat16 streams by tensor cores, with
weights in two parts. Knows nothing of sublayers.

X rows, M streams, K outputs of the projection, W columns.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from eprt.ops.streams import StreamProjection

_PIECE = 512  # columns that are weighed at once
_MOST_SPLITS = 128  # whose sums the second kernel adds up in registers


# These change from step to step and must not cause another compilation.
@triton.jit(do_not_specialize=["num_rows", "share"])
def _project(
    part_SXK,
    x,
    fn,
    num_rows,
    width,
    num_outputs,
    share,
    WHOLE: tl.constexpr,
    ACCURATE: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """A split's part of each row's outputs and, behind them, of the sum of its squares. share: times COLUMNS."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    k, split = tl.arange(0, OUTPUTS), tl.program_id(1)
    present, known = (row < num_rows)[:, None], (k < num_outputs)[:, None]
    acc, squares = tl.zeros([ROWS, OUTPUTS], tl.float32), tl.zeros([ROWS], tl.float32)
    for step in range(split * share, tl.minimum(tl.cdiv(width, COLUMNS), (split + 1) * share)):
        column = (step * COLUMNS + tl.arange(0, COLUMNS))[None, :]
        has, counts = present, known
        if not WHOLE:  # masks of columns keep loads from being wide
            has, counts = present & (column < width), known & (column < width)
        value = tl.load(x + row.to(tl.int64)[:, None] * width + column, mask=has, other=0.0).to(tl.float32)
        weight = tl.load(fn + k[:, None] * width + column, mask=counts, other=0.0)
        if ACCURATE:
            acc = tl.dot(value, tl.trans(weight), acc, input_precision="ieee")
        else:  # tf32 holds bfloat16 values, and what two parts of a weight have of its digits
            high = (weight.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)
            acc = tl.dot(value, tl.trans(high), acc, input_precision="tf32")
            acc = tl.dot(value, tl.trans(weight - high), acc, input_precision="tf32")
        squares += tl.sum(value * value, 1)
    acc = tl.where((k == num_outputs)[None, :], squares[:, None], acc)
    to = part_SXK + (split * num_rows + row).to(tl.int64)[:, None] * OUTPUTS + k[None, :]
    tl.store(to, acc, mask=(row < num_rows)[:, None] & (k <= num_outputs)[None, :])


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _stochastic(comb_MM, num_iterations, eps, STREAMS: tl.constexpr):
    """Rows of the logits' softmax, then columns and rows divided by their sums in turns. Scalars: nothing waits for
    other threads in the many short steps. comb_MM: row by row; minus infinity where there is no stream."""
    rows = ()
    for k in tl.static_range(STREAMS):
        most = comb_MM[k * STREAMS]
        for j in tl.static_range(1, STREAMS):
            most = tl.maximum(most, comb_MM[k * STREAMS + j])
        most = tl.where(most == float("-inf"), 0.0, most)
        for j in tl.static_range(STREAMS):
            rows += (tl.exp(comb_MM[k * STREAMS + j] - most),)
    comb = _divided(rows, 0.0, True, STREAMS)
    exists = ()
    for at in tl.static_range(STREAMS * STREAMS):
        exists += (tl.where(comb_MM[at] > float("-inf"), comb[at] + eps, 0.0),)
    comb = exists
    for i in range(num_iterations):
        if i > 0:
            comb = _divided(comb, eps, True, STREAMS)
        comb = _divided(comb, eps, False, STREAMS)
    return comb


@triton.jit
def _divided(comb_MM, eps, ROWS: tl.constexpr, STREAMS: tl.constexpr):
    """By the sums of rows or of columns."""
    factor = ()
    for a in tl.static_range(STREAMS):
        total = 0.0
        for b in tl.static_range(STREAMS):
            total += comb_MM[a * STREAMS + b if ROWS else b * STREAMS + a]
        factor += (1.0 / tl.maximum(total + eps, 1e-30),)
    divided = ()
    for k in tl.static_range(STREAMS):
        for j in tl.static_range(STREAMS):
            divided += (comb_MM[k * STREAMS + j] * factor[k if ROWS else j],)
    return divided


@triton.jit
def _weights(part_S, has, scale, base, post, rule, HEAD: tl.constexpr, STREAMS: tl.constexpr, OUTPUTS: tl.constexpr):
    """Scalars: each stream's weight in the sublayer's input and, unless HEAD, in each stream of the mixture.

    has: which splits there are. post: where each stream's share of the output goes.
    """
    num_streams, width, num_iterations, eps, norm_eps = rule
    num_outputs = num_streams if HEAD else num_streams * (2 + num_streams)
    o = tl.arange(0, OUTPUTS)
    mask = has[:, None] & (o <= num_outputs)[None, :]
    sum_O = tl.sum(tl.load(part_S[:, None] + o[None, :], mask=mask, other=0.0), 0)
    squares = tl.sum(tl.where(o == num_outputs, sum_O, 0.0), 0)
    factor = 1.0 / tl.sqrt_rn(squares / width + norm_eps)
    kind = tl.minimum(o // num_streams, 2)
    known = o < num_outputs
    logit = sum_O * factor * tl.load(scale + kind, mask=known, other=0.0) + tl.load(base + o, mask=known, other=0.0)
    share = _sigmoid(logit)
    weights = ()
    for j in tl.static_range(STREAMS):
        pre = tl.sum(tl.where(o == j, share + eps, 0.0), 0)
        weights += (tl.where(j < num_streams, pre, 0.0),)
    if not HEAD:
        tl.store(post + (o - num_streams), 2.0 * share, mask=(kind == 1) & (tl.program_id(1) == 0))
        comb = ()
        for k in tl.static_range(STREAMS):
            for j in tl.static_range(STREAMS):
                cell = tl.sum(tl.where(o == (2 + k) * num_streams + j, logit, 0.0), 0)
                comb += (tl.where((j < num_streams) & (k < num_streams), cell, float("-inf")),)
        comb = _stochastic(comb, num_iterations, eps, STREAMS)
        for k in tl.static_range(STREAMS):
            for j in tl.static_range(STREAMS):
                weights += (comb[j * STREAMS + k],)
    return weights


@triton.jit(do_not_specialize=["num_rows", "num_splits", "share"])
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
    """share: times PIECE columns, of a program. All programs of a row make the same weights."""
    row, width, s = tl.program_id(0).to(tl.int64), num_streams * size, tl.arange(0, SPLITS)
    rule = num_streams, width, num_iterations, eps, norm_eps
    if not HEAD:
        post += row * num_streams
    part_S = part_SXK + (s * num_rows + row) * OUTPUTS
    weights = _weights(part_S, s < num_splits, scale, base, post, rule, HEAD, STREAMS, OUTPUTS)
    begin = tl.program_id(1) * share
    for step in range(begin, tl.minimum(tl.cdiv(size, PIECE), begin + share)):
        column = step * PIECE + tl.arange(0, PIECE)
        known, streams = column < size, ()
        for j in tl.static_range(STREAMS):
            at = x + row * width + j * size + column
            streams += (tl.load(at, mask=known & (j < num_streams), other=0.0).to(tl.float32),)
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


@dataclass(frozen=True)
class StreamTiling:
    """How the kernels divide rows; rows and columns are the first's."""

    rows: int  # of a program
    columns: int  # of a step
    programs: int  # of each kernel at most, if rows do not need more
    num_warps: int


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
    accurate, block = x_TMH.dtype == torch.float32, max(16, triton.next_power_of_2(outputs + 1))
    tiling = tiling_of(T, accurate)
    tiles, columns = triton.cdiv(T, tiling.rows), tiling.columns
    share = _share(triton.cdiv(width, columns), tiles, min(_MOST_SPLITS * tiles, tiling.programs))
    splits = triton.cdiv(triton.cdiv(width, columns), share)
    part_SXK = torch.empty(splits, T, block, dtype=torch.float32, device=x_TMH.device)
    _project[(tiles, splits)](
        part_SXK,
        x_TMH,
        p.fn_KW,
        T,
        width,
        outputs,
        share,
        WHOLE=width % columns == 0,
        ACCURATE=accurate,
        ROWS=tiling.rows,
        OUTPUTS=block,
        COLUMNS=columns,
        num_warps=tiling.num_warps,
        num_stages=3,
    )
    _weigh(row_TH, mixed_TMH, post_TM, part_SXK, x_TMH, p, tiling.programs)
    return row_TH


def _weigh(
    row_TH: Tensor,
    mixed_TMH: Tensor | None,
    post_TM: Tensor | None,
    part_SXK: Tensor,
    x_TMH: Tensor,
    p: StreamProjection,
    programs: int,
) -> None:
    """The second kernel."""
    (splits, T, block), (_, M, H) = part_SXK.shape, x_TMH.shape
    piece = min(_PIECE, triton.next_power_of_2(H))
    share = _share(triton.cdiv(H, piece), T, programs)
    _mix[(T, triton.cdiv(triton.cdiv(H, piece), share))](
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
        share,
        HEAD=mixed_TMH is None,
        STREAMS=triton.next_power_of_2(M),
        OUTPUTS=block,
        SPLITS=triton.next_power_of_2(splits),
        PIECE=piece,
        num_warps=4,
    )


def tiling_of(rows: int, accurate: bool) -> StreamTiling:
    if accurate:
        return StreamTiling(16, 32, 132, 4)
    if rows <= 512:  # many small programs, so that few splits have to be added up
        return StreamTiling(16, 256 if rows <= 16 else 64, 132, 4)
    return StreamTiling(64, 64, 528, 4)


def _share(steps: int, tiles: int, programs: int) -> int:
    """Steps of one program, of at most so many."""
    return triton.cdiv(steps, max(1, min(steps, programs // tiles)))
