"""The indexer's choice in Triton: one program chooses for one row. Four passes over its scores find the score of the
last token chosen, digit by digit, and a fifth lists the tokens in the order of position.
"""

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096  # scores read at once
_DIGITS = tl.constexpr(256)


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


def is_installed() -> bool:
    return True


def refusal(score_XS: Tensor, top_k: int) -> str | None:
    return None


def choose(
    slot_XK: Tensor, score_XS: Tensor, page_table_BP: Tensor, request_X: Tensor, length_X: Tensor, page_size: int
) -> None:
    """Fills slot_XK from the first length_X scores of each row."""
    (X, top_k), most_seen = slot_XK.shape, score_XS.shape[1]
    _choose_best[(X,)](
        slot_XK,
        score_XS,
        page_table_BP,
        request_X,
        length_X,
        page_table_BP.stride(0),
        score_XS.stride(0),
        top_k,
        PAGE=page_size,
        TOP_K=triton.next_power_of_2(top_k),
        BLOCK=min(_BLOCK, max(16, triton.next_power_of_2(most_seen))),
        num_warps=8,
    )
