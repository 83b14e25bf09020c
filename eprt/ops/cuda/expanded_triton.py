"""Expanded attention of prompts in Triton, for every GPU: any sizes of heads. Knows a group of heads whose keys and
values are given (mla_expanded.py); kernels of the same interface lie beside it.

C nope, R rotary, V value sizes; S context tokens of all requests, one request after the other.
"""

import triton
import triton.language as tl
from torch import Tensor

from eprt.ops.attention import PagedContext
from eprt.ops.cuda.mla_triton import block_of, load_queries, rows_of_tile

_LOG2E = tl.constexpr(1.4426950408889634)


def refusal(q_TNC: Tensor, r_TNR: Tensor, kv_SNE: Tensor) -> None:
    """It takes everything."""


@triton.jit
def _add_keys(
    most, total, acc, query, context, sizes, key, scale, MASKED: tl.constexpr, KEYS: tl.constexpr, WHOLE: tl.constexpr
):
    """Adds a tile of keys to the running softmax.

    query: (q [TILE, NOPE], r [TILE, ROPE], the first so many keys that each row sees).
    context: (expanded keys and values of the head, its stride, rotated keys, first row of the request, its keys).
    sizes: (nope, rope, value). MASKED: some rows do not see all keys. WHOLE: tiles have exactly these sizes.
    """
    q, r, sees = query
    kv, kv_stride, rope, begin, end = context
    nope, rope_size, value = sizes
    position = key + tl.arange(0, KEYS)
    row = (begin + position).to(tl.int64)
    c, j, v = tl.arange(0, q.shape[1]), tl.arange(0, r.shape[1]), tl.arange(0, acc.shape[1])
    known = position < end
    key_at, value_at = kv + row[None, :] * kv_stride + c[:, None], kv + nope + row[:, None] * kv_stride + v[None, :]
    rope_at = rope + row[None, :] * rope_size + j[:, None]
    if WHOLE and not MASKED:
        k, p, x = tl.load(key_at), tl.load(rope_at), tl.load(value_at)
    else:
        k = tl.load(key_at, mask=known[None, :] & (c < nope)[:, None], other=0.0)
        p = tl.load(rope_at, mask=known[None, :] & (j < rope_size)[:, None], other=0.0)
        x = tl.load(value_at, mask=known[:, None] & (v < value)[None, :], other=0.0)
    score = tl.dot(r, p, tl.dot(q, k)) * (scale * _LOG2E)
    if MASKED:
        score = tl.where((position[None, :] < sees[:, None]) & known[None, :], score, float("-inf"))
    larger = tl.maximum(most, tl.max(score, 1))
    base = tl.where(larger == float("-inf"), 0.0, larger) if MASKED else larger
    weight, fade = tl.exp2(score - base[:, None]), tl.exp2(most - base)
    acc = tl.dot(weight.to(x.dtype), x, acc * fade[:, None])
    return larger, total * fade + tl.sum(weight, 1), acc


@triton.jit(do_not_specialize=["num_requests", "num_tiles"])
def _attend_heads(
    out,
    q_nope,
    q_rope,
    kv,
    rope,
    seq_len_B,
    query_start_B1,
    scale,
    num_requests,
    num_tiles,
    nope,
    rope_size,
    value,
    kv_stride,
    q_token_stride,
    q_head_stride,
    r_token_stride,
    r_head_stride,
    out_token_stride,
    REQUESTS: tl.constexpr,
    TILE: tl.constexpr,
    KEYS: tl.constexpr,
    NOPE: tl.constexpr,
    ROPE: tl.constexpr,
    VALUE: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """One tile of a request's new tokens, one head. The last tiles see most keys, so they start first."""
    tile, head = num_tiles - 1 - tl.program_id(0), tl.program_id(1)
    request, first_token, num_tokens, first = rows_of_tile(tile, query_start_B1, num_requests, 1, REQUESTS, TILE)
    if request >= num_requests:
        return
    row = first + tl.arange(0, TILE)
    inside, token = row < num_tokens, (first_token + row).to(tl.int64)
    length = tl.load(seq_len_B + request)
    sees = tl.where(inside, length - num_tokens + row + 1, 0)
    end = tl.max(sees, 0)
    seen_by_all = (length - num_tokens + first + 1) // KEYS * KEYS
    seen_by_all = tl.minimum(seen_by_all, end // KEYS * KEYS)
    q, _ = load_queries(q_nope, token, q_token_stride, head * q_head_stride, inside, nope, NOPE)
    r, _ = load_queries(q_rope, token, r_token_stride, head * r_head_stride, inside, rope_size, ROPE)
    b, v = tl.arange(0, REQUESTS), tl.arange(0, VALUE)
    begin = tl.sum(tl.load(seq_len_B + b, mask=b < request, other=0), 0)
    query, sizes = (q, r, sees), (nope, rope_size, value)
    context = kv + head * (nope + value), kv_stride, rope, begin, end
    most, total = tl.full([TILE], float("-inf"), tl.float32), tl.zeros([TILE], tl.float32)
    acc = tl.zeros([TILE, VALUE], tl.float32)
    for key in range(0, seen_by_all, KEYS):
        most, total, acc = _add_keys(most, total, acc, query, context, sizes, key, scale, False, KEYS, WHOLE)
    for key in range(seen_by_all, end, KEYS):
        most, total, acc = _add_keys(most, total, acc, query, context, sizes, key, scale, True, KEYS, WHOLE)
    result = (acc / tl.where(total == 0, 1.0, total)[:, None]).to(out.dtype.element_ty)
    mask = inside[:, None] & (v < value)[None, :]
    tl.store(out + token[:, None] * out_token_stride + head * value + v[None, :], result, mask=mask)


def attend(
    out: Tensor,
    q: Tensor,
    r: Tensor,
    kv: Tensor,
    rope_SR: Tensor,
    context: PagedContext,
    softmax_scale: float,
    tile: int = 128,
    keys: int = 64,
) -> None:
    """Attention of a group of heads, written to `out`. kv: their expanded context, [S, heads, C + V]."""
    (T, heads, C), R, V, B = q.shape, r.shape[2], out.shape[2], context.seq_len_B.shape[0]
    num_tiles = triton.cdiv(T, tile) + B
    _attend_heads[(num_tiles, heads)](
        out,
        q,
        r,
        kv,
        rope_SR,
        context.seq_len_B,
        context.query_start_B1,
        softmax_scale,
        B,
        num_tiles,
        C,
        R,
        V,
        kv.stride(0),
        *q.stride()[:2],
        *r.stride()[:2],
        out.stride(0),
        REQUESTS=max(64, triton.next_power_of_2(B)),
        TILE=tile,
        KEYS=keys,
        NOPE=block_of(C),
        ROPE=block_of(R),
        VALUE=block_of(V),
        WHOLE=(block_of(C), block_of(R), block_of(V)) == (C, R, V),
        num_warps=8,
        num_stages=2 if keys > 64 else 3,
    )
