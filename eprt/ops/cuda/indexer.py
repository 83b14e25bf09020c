"""The indexer of DeepSeek-V3.2 on GPUs: scores, choice, and attention to what is chosen.

Scores of some rows at a time lie in a workspace of bounded size. One program chooses for one row: four passes over its
scores find the score of the last token chosen, digit by digit, and a fifth lists the tokens in the order of position.
Nothing is read on the host, so all of it may be recorded in a CUDA graph.

X rows, N heads, D values of a head, K chosen tokens, S tokens of the longest context.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from eprt.ops.attention import PagedContext
from eprt.ops.cuda import mla_triton
from eprt.ops.cuda.attention import absorbed
from eprt.ops.cuda.cache import insert_entries
from eprt.ops.elementwise import Rotation
from eprt.ops.index_format import IndexFormat

_MOST_SCORES = 1 << 27  # in the workspace: 512 MB
_MOST_ROWS = 1024  # attended at once: absorbed queries of 128 heads take 150 KB a row
_KEYS = 128  # scored by one program
_BLOCK = 4096  # scores read at once by the program that chooses
_DIGITS = tl.constexpr(256)


# These change from step to step and must not cause another compilation.
@triton.jit(do_not_specialize=["table_width", "most_seen"])
def _index_scores(
    score_XS,
    query,
    weight_XN,
    keys,
    offset_P,
    page_table,
    request_X,
    length_X,
    query_row,
    query_head,
    num_heads,
    size,
    entry_size,
    table_width,
    most_seen,
    FP8: tl.constexpr,
    ACCURATE: tl.constexpr,
    PAGE: tl.constexpr,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    KEYS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    length, first = tl.load(length_X + row), tl.program_id(1) * KEYS
    if first >= length:
        return
    position, head, i = first + tl.arange(0, KEYS), tl.arange(0, HEADS), tl.arange(0, SIZE)
    known = position < length
    request = tl.load(request_X + row).to(tl.int64)
    page = tl.load(page_table + request * table_width + position // PAGE, mask=known, other=0)
    # Read from memory, so that the compiler takes no multiple of the entry's 132 bytes for one of 16.
    offset = tl.load(offset_P + position % PAGE, mask=known, other=0)
    key = keys + (page.to(tl.int64) * PAGE + offset) * entry_size
    inside = known[:, None] & (i < size)[None, :]
    mask = (head < num_heads)[:, None] & (i < size)[None, :]
    q = tl.load(query + row * query_row + head[:, None] * query_head + i[None, :], mask=mask, other=0.0)
    if FP8:
        k = tl.load(key.to(tl.pointer_type(tl.float8e4nv))[:, None] + i[None, :], mask=inside, other=0.0)
    else:
        k = tl.load(key[:, None] + i[None, :], mask=inside, other=0.0)
    precision: tl.constexpr = "ieee" if ACCURATE else "tf32"
    product = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision=precision)
    weight = tl.load(weight_XN + row * num_heads + head, mask=head < num_heads, other=0.0)
    score = tl.sum(tl.maximum(product, 0.0) * weight[:, None], 0)
    if FP8:  # positive, so it may follow the sum
        score *= tl.load((key + size).to(tl.pointer_type(tl.float32)), mask=known, other=0.0)
    tl.store(score_XS + row * most_seen + position, score, mask=known)


@triton.jit
def _ordered(score_S, position, known):
    """Scores as whole numbers 0..2^32 - 1 of the same order; what is not a number is the lowest, -0 equals 0."""
    score = tl.load(score_S + position, mask=known, other=0.0)
    score = tl.where(score == score, score, float("-inf"))
    bits = tl.where(score == 0.0, 0.0, score).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) + 2147483648


@triton.jit
def _last_chosen(score_S, length, top_k, BLOCK: tl.constexpr):
    """(the score, ordered, of the last token chosen; how many of equal score are). length: above top_k."""
    digit = tl.arange(0, _DIGITS)
    prefix, left = tl.zeros([], tl.int64), top_k
    for step in tl.static_range(4):
        shift = 24 - 8 * step
        count = tl.zeros([_DIGITS], tl.int32)
        for first in range(0, length, BLOCK):
            position = first + tl.arange(0, BLOCK)
            value = _ordered(score_S, position, position < length)
            counted = (position < length) & ((value >> (shift + 8)) == prefix)
            count += tl.histogram(((value >> shift) & 255).to(tl.int32), _DIGITS, mask=counted)
        at_least = tl.cumsum(count, 0, reverse=True)
        found = tl.sum((at_least >= left).to(tl.int32), 0) - 1
        left -= tl.sum(tl.where(digit > found, count, 0), 0)
        prefix = prefix * 256 + found
    return prefix, left


@triton.jit(do_not_specialize=["table_width", "most_seen"])
def _choose_best(
    slot_XK,
    score_XS,
    page_table,
    request_X,
    length_X,
    table_width,
    most_seen,
    top_k,
    PAGE: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    length, score_S, slot_K = tl.load(length_X + row), score_XS + row * most_seen, slot_XK + row * top_k
    table = page_table + tl.load(request_X + row).to(tl.int64) * table_width
    last, num_equal = tl.zeros([], tl.int64), top_k  # all, where there are not more
    if length > top_k:
        last, num_equal = _last_chosen(score_S, length, top_k, BLOCK)
    num_chosen, num_passed = 0, 0
    for first in range(0, length, BLOCK):
        position = first + tl.arange(0, BLOCK)
        known = position < length
        value = _ordered(score_S, position, known)
        equal = (known & (value == last)).to(tl.int32)
        before = num_passed + tl.cumsum(equal, 0) - equal
        chosen = known & ((value > last) | ((equal == 1) & (before < num_equal)))
        at = num_chosen + tl.cumsum(chosen.to(tl.int32), 0) - 1
        page = tl.load(table + position // PAGE, mask=chosen, other=0)
        tl.store(slot_K + at, page * PAGE + position % PAGE, mask=chosen)
        num_chosen += tl.sum(chosen.to(tl.int32), 0)
        num_passed += tl.sum(equal, 0)
    k = tl.arange(0, TOP_K)
    tl.store(slot_K + k, -1, mask=(k >= num_chosen) & (k < top_k))


def index_insert(key_pages: Tensor, kv_slot_T: Tensor, key_TD: Tensor) -> None:
    """As eprt.ops.indexer.index_insert. key_pages must be contiguous; slots are not checked."""
    entry = IndexFormat(key_TD.shape[-1], key_pages.dtype)
    insert_entries(key_pages, kv_slot_T, key_TD.contiguous(), 0, entry.width, entry.is_fp8)


def index_topk(
    query_TND: Tensor,
    weight_TN: Tensor,
    key_pages: Tensor,
    page_table_BP: Tensor,
    request_T: Tensor,
    length_T: Tensor,
    top_k: int,
    most_scores: int = _MOST_SCORES,
) -> Tensor:
    """As eprt.ops.indexer.index_topk. Pages and lengths are not checked."""
    X = query_TND.shape[0]
    slot_XK = torch.empty(X, top_k, dtype=torch.int32, device=query_TND.device)
    most_seen = page_table_BP.shape[1] * key_pages.shape[1]
    rows = max(1, most_scores // max(1, most_seen))
    for first in range(0, X, rows):
        piece = slice(first, first + rows)
        query, weight = query_TND[piece].contiguous(), weight_TN[piece].contiguous()
        where = page_table_BP, request_T[piece], length_T[piece]
        _choose_rows(slot_XK[piece], query, weight, key_pages, *where)
    return slot_XK


def _choose_rows(
    slot_XK: Tensor,
    query_XND: Tensor,
    weight_XN: Tensor,
    key_pages: Tensor,
    page_table_BP: Tensor,
    request_X: Tensor,
    length_X: Tensor,
) -> None:
    (X, N, D), page_size, top_k = query_XND.shape, key_pages.shape[1], slot_XK.shape[1]
    entry, most_seen = IndexFormat(D, key_pages.dtype), page_table_BP.shape[1] * page_size
    score_XS = torch.empty(X, most_seen, dtype=torch.float32, device=query_XND.device)
    where = page_table_BP, request_X, length_X
    _index_scores[(X, triton.cdiv(most_seen, _KEYS))](
        score_XS,
        query_XND,
        weight_XN,
        key_pages,
        torch.arange(page_size, dtype=torch.int32, device=query_XND.device),
        *where,
        *query_XND.stride()[:2],
        N,
        D,
        entry.width,
        page_table_BP.stride(0),
        most_seen,
        FP8=entry.is_fp8,
        ACCURATE=query_XND.dtype == torch.float32,
        PAGE=page_size,
        HEADS=mla_triton.block_of(N),
        SIZE=mla_triton.block_of(D),
        KEYS=_KEYS,
    )
    _choose_best[(X,)](
        slot_XK,
        score_XS,
        *where,
        page_table_BP.stride(0),
        most_seen,
        top_k,
        PAGE=page_size,
        TOP_K=triton.next_power_of_2(top_k),
        BLOCK=min(_BLOCK, max(16, triton.next_power_of_2(most_seen))),
        num_warps=8,
    )


def mla_chosen(
    q_nope_TNC: Tensor,
    q_rope_TNR: Tensor,
    kv_pages: Tensor,
    slot_TK: Tensor,
    length_T: Tensor,
    w_kv_b: Tensor,
    softmax_scale: float,
    rotation: Rotation,
) -> Tensor:
    """As eprt.ops.indexer.mla_chosen, some rows at a time."""
    kv_pages, parts = kv_pages.view(-1, 1, kv_pages.shape[2]), []  # pages of one token
    for first in range(0, max(1, len(slot_TK)), _MOST_ROWS):
        rows = slice(first, first + _MOST_ROWS)
        context = PagedContext(kv_pages, slot_TK[rows], length_T[rows])
        turned = Rotation(rotation.cos_sin_PR, rotation.position_T[rows], rotation.interleaved)
        parts.append(absorbed(mla_triton, q_nope_TNC[rows], q_rope_TNR[rows], context, w_kv_b, softmax_scale, turned))
    return parts[0] if len(parts) == 1 else torch.cat(parts)
