"""DeepSeek-V4's attention on GPUs: one program attends some heads of one query to a part of its keys.

A query's keys are its tokens and, behind them, its entries, in one numbering. Where queries are few the keys are cut
into splits, whose results a second kernel adds up; each split finds its part on the GPU, so a recorded graph serves
every length. Prompts have one split and no workspace. Both kernels may turn the output back and round it: what
turn_rows does with it otherwise.

T queries, N heads, D values of a key, S splits. Knows nothing of who owns pages.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from eprt.ops.cuda.mla_triton import block_of
from eprt.ops.cuda.shared_keys import SharedKeys, load_keys
from eprt.ops.cuda.turned_rows import checked_half
from eprt.ops.elementwise import Rotation
from eprt.ops.shared_attention import SeenEntries, SeenRing, SeenTokens

_LOG2E = tl.constexpr(1.4426950408889634)
_MOST_SPLITS = 32
_VALUES = 4096  # of parts that a program adds up


@triton.jit
def _turned_back(value, angles, first, size, half, ROWS: tl.constexpr, SIZE: tl.constexpr):
    """[ROWS, SIZE], columns from `first` on; the last of all are rotated by the negative angles, as by turn_rows."""
    pair = first // 2 + tl.arange(0, SIZE // 2)
    place = pair - (size // 2 - half)
    turns = (place >= 0) & (place < half)
    cos = tl.load(angles + place, mask=turns, other=1.0)[None, :]
    sin = tl.load(angles + half + place, mask=turns, other=0.0)[None, :]
    a, b = tl.split(tl.reshape(value, [ROWS, SIZE // 2, 2]))
    low = tl.where(turns[None, :], tl.fma(a, cos, b * sin), a)
    high = tl.where(turns[None, :], tl.fma(b, cos, a * -sin), b)
    return tl.reshape(tl.join(low, high), [ROWS, SIZE])


@triton.jit
def _add_keys(most, total, acc, score, keys, ACCURATE: tl.constexpr):
    """Adds keys to the running softmax. most: largest score so far; total: sum of the weights; acc: of the keys."""
    larger = tl.maximum(most, tl.max(score, 1))
    base = tl.where(larger == float("-inf"), 0.0, larger)
    weight, fade = tl.exp2(score - base[:, None]), tl.exp2(most - base)
    precision: tl.constexpr = "ieee" if ACCURATE else "tf32"
    total = total * fade + tl.sum(weight, 1)
    acc = tl.dot(weight.to(keys.dtype), keys, acc * fade[:, None], input_precision=precision)
    return larger, total, acc


@triton.jit
def _with_sink(seen, sink):
    """The mean of the keys that a head saw, with the sink's share."""
    most, total, acc = seen
    larger = tl.maximum(most, sink)
    fade = tl.exp2(most - larger)
    return acc * (fade / (total * fade + tl.exp2(sink - larger)))[:, None]


@triton.jit
def _store_part(partial, log_sum, seen, row, mask, size):
    """The mean of a part's keys and the logarithm of its weight; of a part without keys only that, minus infinity."""
    most, total, acc = seen
    i = tl.arange(0, acc.shape[1])
    total = tl.where(total == 0, 1.0, total)
    tl.store(log_sum + row, most + tl.log2(total), mask=tl.max(mask.to(tl.int32), 1) > 0)
    has = mask & (most > float("-inf"))[:, None]
    tl.store(partial + row[:, None] * size + i[None, :], acc / total[:, None], mask=has)


@triton.jit
def _keys_of_part(begin_T, end_T, num_T, t, num_splits, KEYS: tl.constexpr):
    """(first token, tokens, first key, end of the keys) of this program's part of a query's keys, in whole steps."""
    first_token = tl.load(begin_T + t).to(tl.int64)
    num_local = (tl.load(end_T + t).to(tl.int64) - first_token).to(tl.int32)
    num_keys = num_local + tl.load(num_T + t).to(tl.int32)
    share = tl.cdiv(tl.cdiv(num_keys, num_splits), KEYS) * KEYS
    begin = tl.program_id(1) * share
    return first_token, num_local, begin, tl.minimum(num_keys, begin + share)


@triton.jit
def _attend_keys(
    q,
    local,
    pages,
    begin,
    where,
    scale,
    stored: tl.constexpr,
    ACCURATE: tl.constexpr,
    KEYS: tl.constexpr,
):
    """(largest score, sum of the weights, weighted sum of the keys) of a part of a query's keys, per head."""
    TILE: tl.constexpr = q.shape[0]
    SIZE: tl.constexpr = q.shape[1]
    most, total = tl.full([TILE], float("-inf"), tl.float32), tl.zeros([TILE], tl.float32)
    acc, end = tl.zeros([TILE, SIZE], tl.float32), where[2]
    precision: tl.constexpr = "ieee" if ACCURATE else "tf32"
    for key in range(begin, end, KEYS):
        at = key + tl.arange(0, KEYS)
        keys = load_keys(local, pages, at, where, q.dtype, stored, KEYS, SIZE)
        score = tl.dot(q, tl.trans(keys), input_precision=precision)
        score = tl.where((at < end)[None, :], score * (scale * _LOG2E), float("-inf"))
        most, total, acc = _add_keys(most, total, acc, score, keys, ACCURATE)
    return most, total, acc


# These change from step to step: a value of 1, or a multiple of 16, must not cause another compilation.
@triton.jit(do_not_specialize=["num_queries", "table_width", "num_splits"])
def _attend(
    out,
    partial,
    log_sum,
    query,
    local,
    page_T,
    begin_T,
    end_T,
    pages,
    table,
    request_T,
    num_T,
    slot_TK,
    sink_N,
    cos_sin,
    position_T,
    scale,
    num_queries,
    num_heads,
    size,
    half,
    local_page,
    entry_page,
    table_width,
    slot_width,
    num_splits,
    RING: tl.constexpr,
    PAGE: tl.constexpr,
    WIDTH: tl.constexpr,
    PLAIN: tl.constexpr,
    FP8: tl.constexpr,
    SPLIT: tl.constexpr,
    ACCURATE: tl.constexpr,
    TILE: tl.constexpr,
    KEYS: tl.constexpr,
    SIZE: tl.constexpr,
):
    tiles = tl.cdiv(num_heads, TILE)
    t, head = (tl.program_id(0) // tiles).to(tl.int64), tl.program_id(0) % tiles * TILE + tl.arange(0, TILE)
    first_token, num_local, begin, end = _keys_of_part(begin_T, end_T, num_T, t, num_splits, KEYS)
    inside, i, row = head < num_heads, tl.arange(0, SIZE), t * num_heads + head
    mask = inside[:, None] & (i < size)[None, :]
    q = tl.load(query + row[:, None] * size + i[None, :], mask=mask, other=0.0)
    if RING > 0:
        local += tl.load(page_T + t).to(tl.int64) * local_page
    of_request = table + tl.load(request_T + t).to(tl.int64) * table_width
    chosen = of_request if slot_TK is None else slot_TK + t * slot_width
    where = first_token, num_local, end, chosen, entry_page, size
    stored: tl.constexpr = slot_TK is not None, RING, PAGE, WIDTH, PLAIN, FP8
    seen = _attend_keys(q, local, pages, begin, where, scale, stored, ACCURATE, KEYS)
    if SPLIT:
        _store_part(partial, log_sum, seen, row + tl.program_id(1).to(tl.int64) * num_queries * num_heads, mask, size)
    else:
        value = _with_sink(seen, tl.load(sink_N + head, mask=inside, other=0.0) * _LOG2E)
        if cos_sin is not None:
            angles = cos_sin + tl.load(position_T + t).to(tl.int64) * 2 * half
            value = _turned_back(value, angles, 0, size, half, TILE, SIZE)
        tl.store(out + row[:, None] * size + i[None, :], value.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_rows", "num_splits"])
def _add_splits(
    out,
    partial,
    log_sum,
    sink_N,
    cos_sin,
    position_T,
    num_rows,
    num_heads,
    size,
    half,
    num_splits,
    SPLITS: tl.constexpr,
    PIECE: tl.constexpr,
):
    """PIECE: columns of a program, whose parts are all in flight at once."""
    row, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * PIECE
    s, i = tl.arange(0, SPLITS), first + tl.arange(0, PIECE)
    log = tl.load(log_sum + s * num_rows + row, mask=s < num_splits, other=float("-inf"))
    sink = tl.load(sink_N + row % num_heads) * _LOG2E
    most = tl.maximum(tl.max(log, 0), sink)
    weight = tl.exp2(log - most)
    weight /= tl.sum(weight, 0) + tl.exp2(sink - most)
    known = (log > float("-inf"))[:, None] & (i < size)[None, :]  # of a split without keys nothing was written
    part = tl.load(partial + (s * num_rows + row).to(tl.int64)[:, None] * size + i[None, :], mask=known, other=0.0)
    value = tl.sum(weight[:, None] * part, 0)
    if cos_sin is not None:
        angles = cos_sin + tl.load(position_T + row // num_heads).to(tl.int64) * 2 * half
        value = _turned_back(tl.reshape(value, [1, PIECE]), angles, first, size, half, 1, PIECE)
        value = tl.reshape(value, [PIECE])
    tl.store(out + row * size + i, value.to(out.dtype.element_ty), mask=i < size)


@dataclass(frozen=True)
class SharedTiling:
    """How the kernel divides attention to shared keys."""

    heads: int  # of a program
    keys: int  # per step
    num_warps: int
    num_stages: int  # steps whose loads are in flight


def shared_attention(
    query_TND: Tensor,
    tokens: SeenTokens | SeenRing,
    entries: SeenEntries,
    sink_N: Tensor,
    scale: float,
    rope_size: int = 0,
    num_splits: int | None = None,
) -> Tensor:
    """As eprt.ops.shared_attention.shared_attention. What queries see is not checked.

    num_splits: default: as many as give all SMs work.
    """
    out_TND = query_TND.new_empty(query_TND.shape, dtype=torch.float32)
    _launch(out_TND, query_TND, tokens, entries, sink_N, scale, rope_size, None, num_splits)
    return out_TND


def turned_attention(
    query_TND: Tensor,
    tokens: SeenTokens | SeenRing,
    entries: SeenEntries,
    sink_N: Tensor,
    scale: float,
    rotation: Rotation,
    dtype: torch.dtype,
    num_splits: int | None = None,
) -> Tensor:
    """As eprt.ops.shared_attention.turned_attention, by the same kernels as shared_attention."""
    out_TND = query_TND.new_empty(query_TND.shape, dtype=dtype)
    rope_size = rotation.cos_sin_PR.shape[1]
    _launch(out_TND, query_TND, tokens, entries, sink_N, scale, rope_size, rotation, num_splits)
    return out_TND


def _launch(
    out_TND: Tensor,
    query_TND: Tensor,
    tokens: SeenTokens | SeenRing,
    entries: SeenEntries,
    sink_N: Tensor,
    scale: float,
    rope_size: int,
    rotation: Rotation | None,
    num_splits: int | None,
) -> None:
    T, N, D = query_TND.shape
    if not query_TND.numel():
        return
    keys = SharedKeys(tokens, entries, D, rope_size, query_TND.dtype)
    half = 0 if rotation is None else checked_half(rotation, D)
    turned = (None, None) if rotation is None else (rotation.cos_sin_PR, rotation.position_T)
    tiling = tiling_of(query_TND.dtype == torch.float32, N, keys.entry.is_fp8, query_TND.device)
    tiles = triton.cdiv(N, tiling.heads)
    splits = num_splits or splits_of(T * tiles, triton.cdiv(keys.most, tiling.keys), query_TND.device)
    partial = log_sum = None
    if splits > 1:
        partial = torch.empty(splits, T, N, D, dtype=torch.float32, device=out_TND.device)
        log_sum = torch.empty(splits, T, N, dtype=torch.float32, device=out_TND.device)
    _attend[(T * tiles, splits)](
        out_TND,
        partial,
        log_sum,
        query_TND.contiguous(),
        *keys.tensors,
        sink_N,
        *turned,
        scale,
        T,
        N,
        D,
        half,
        *keys.strides,
        splits,
        **keys.constants,
        SPLIT=splits > 1,
        ACCURATE=query_TND.dtype == torch.float32,
        TILE=tiling.heads,
        KEYS=tiling.keys,
        SIZE=block_of(D),
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
    )
    if splits > 1:
        block = triton.next_power_of_2(splits)
        piece = min(block_of(D), _VALUES // block)
        grid, blocks = (T * N, triton.cdiv(D, piece)), {"SPLITS": block, "PIECE": piece}
        _add_splits[grid](out_TND, partial, log_sum, sink_N, *turned, T * N, N, D, half, splits, **blocks)


def tiling_of(accurate: bool, heads: int, is_fp8: bool, device: torch.device) -> SharedTiling:
    if accurate:
        return SharedTiling(16, 16, 4, 1)
    if heads <= 16 or not _holds_large_tiles(device):
        return SharedTiling(16, 32, 4, 2)
    # Of each two loads in flight one is that of indices, so five stages hold the keys of two steps.
    return SharedTiling(64, 64, 8, 5 if is_fp8 else 2)


def _holds_large_tiles(device: torch.device) -> bool:
    """Whether a multiprocessor's shared memory does: they take 130 KiB of it, small ones 81."""
    if device.type != "cuda":
        return True
    return torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor > 132 * 1024


def splits_of(num_programs: int, num_steps: int, device: torch.device) -> int:
    """As many as give every SM a program, none of them without a step. In Triton's interpreter up to two."""
    if device.type != "cuda":
        return min(2, num_steps)
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    most = max(1, min(_MOST_SPLITS, num_steps, sms // num_programs))
    return triton.cdiv(num_steps, triton.cdiv(num_steps, most))
