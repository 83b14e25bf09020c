"""The indexer's scores in Triton: one program scores some keys for one row, in the queries' dtype.

Keys in fp4 are widened in registers; even and odd values have products of their own, as a byte holds one of each.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from eprt.ops.cuda.mla_triton import block_of
from eprt.ops.index_format import IndexFormat

_KEYS = 128  # scored by one program


@triton.jit
def _fp4_value(code):
    """fp32 of e2m1: two bits of exponent, one of fraction, and the sign."""
    exponent, fraction = (code >> 1) & 3, code & 1
    bits = tl.where(exponent == 0, fraction * (126 << 23), ((exponent + 126) << 23) | (fraction << 22))
    return (bits | ((code & 8) << 28)).to(tl.float32, bitcast=True)


@triton.jit
def _fp4_product(q_even, q_odd, key, known, size, SIZE: tl.constexpr):
    """Queries [HEADS, SIZE / 2], of even and of odd values, times keys in fp4."""
    pair = tl.arange(0, SIZE // 2)
    inside = known[:, None] & (pair < size // 2)[None, :]
    byte = tl.load(key[:, None] + pair[None, :], mask=inside, other=0).to(tl.int32)
    # The fp32 product of a value of two bits and a power of 2 is one in bfloat16, too.
    at = key[:, None] + size // 2 + pair[None, :] // 16
    scale = (tl.load(at, mask=inside, other=0).to(tl.int32) << 23).to(tl.float32, bitcast=True)
    even, odd = (_fp4_value(byte & 15) * scale).to(q_even.dtype), (_fp4_value(byte >> 4) * scale).to(q_odd.dtype)
    product = tl.dot(q_even, tl.trans(even), input_precision="ieee")
    return tl.dot(q_odd, tl.trans(odd), product, input_precision="ieee")


# These change from step to step and must not cause another compilation.
@triton.jit(do_not_specialize=["table_width", "score_row"])
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
    key_page,
    table_width,
    score_row,
    FP8: tl.constexpr,
    FP4: tl.constexpr,
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
    key = keys + page.to(tl.int64) * key_page + offset * entry_size
    inside = known[:, None] & (i < size)[None, :]
    mask = (head < num_heads)[:, None] & (i < size)[None, :]
    at = query + row * query_row + head[:, None] * query_head
    precision: tl.constexpr = "ieee" if ACCURATE else "tf32"
    if FP4:
        even = 2 * tl.arange(0, SIZE // 2)[None, :]
        there = (head < num_heads)[:, None] & (even < size)
        q_even, q_odd = tl.load(at + even, mask=there, other=0.0), tl.load(at + even + 1, mask=there, other=0.0)
        product = _fp4_product(q_even, q_odd, key, known, size, SIZE)
    else:
        q = tl.load(at + i[None, :], mask=mask, other=0.0)
        if FP8:
            k = tl.load(key.to(tl.pointer_type(tl.float8e4nv))[:, None] + i[None, :], mask=inside, other=0.0)
        else:
            k = tl.load(key[:, None] + i[None, :], mask=inside, other=0.0)
        product = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision=precision)
    weight = tl.load(weight_XN + row * num_heads + head, mask=head < num_heads, other=0.0)
    score = tl.sum(tl.maximum(product, 0.0) * weight[:, None], 0)
    if FP8:  # positive, so it may follow the sum
        score *= tl.load((key + size).to(tl.pointer_type(tl.float32)), mask=known, other=0.0)
    tl.store(score_XS + row * score_row + position, score, mask=known)


def is_installed() -> bool:
    return True


def refusal(query_XND: Tensor, key_pages: Tensor) -> str | None:
    return None


def score(
    score_XS: Tensor,
    query_XND: Tensor,
    weight_XN: Tensor,
    key_pages: Tensor,
    page_table_BP: Tensor,
    request_X: Tensor,
    length_X: Tensor,
) -> None:
    """Fills the first length_X scores of each row."""
    (X, N, D), page_size = query_XND.shape, key_pages.shape[1]
    entry = IndexFormat.of_pages(D, key_pages)
    _index_scores[(X, triton.cdiv(score_XS.shape[1], _KEYS))](
        score_XS,
        query_XND,
        weight_XN,
        key_pages,
        torch.arange(page_size, dtype=torch.int32, device=query_XND.device),
        page_table_BP,
        request_X,
        length_X,
        *query_XND.stride()[:2],
        N,
        D,
        entry.width,
        key_pages.stride(0),
        page_table_BP.stride(0),
        score_XS.stride(0),
        FP8=entry.is_fp8,
        FP4=entry.is_fp4,
        ACCURATE=query_XND.dtype == torch.float32,
        PAGE=page_size,
        HEADS=block_of(N),
        SIZE=max(32 if entry.is_fp4 else 16, block_of(D)),
        KEYS=_KEYS,
    )
