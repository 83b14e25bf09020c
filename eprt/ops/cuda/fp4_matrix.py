"""One matrix of fp4 weights as bfloat16, which holds its values exactly: for products of many rows.

Knows nothing of experts.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from eprt.ops.cuda.fp4_tile import PLANES, fp4_value, two_to
from eprt.ops.weight import FP4_BLOCK, Weight

_PLANES, _WORDS = tl.constexpr(PLANES), tl.constexpr(FP4_BLOCK // PLANES)
_TILE = 1024  # words of 16 bits


@triton.jit
def _to_bf16(out, word, scale, num_words, TILE: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = at < num_words
    four = tl.load(word + at, mask=inside, other=0)
    factor = two_to(tl.load(scale + at // _WORDS, mask=inside, other=0))
    even = tl.interleave(fp4_value(four) * factor, fp4_value(four >> 8) * factor)
    odd = tl.interleave(fp4_value(four >> 4) * factor, fp4_value(four >> 12) * factor)
    to = tl.program_id(0).to(tl.int64) * TILE * _PLANES + tl.arange(0, TILE * _PLANES)
    tl.store(out + to, tl.interleave(even, odd).to(tl.bfloat16), mask=to < num_words * _PLANES)


def fp4_matrix(w: Weight, which: int) -> Tensor:
    """bfloat16 [N, K]: the matrix of this index in w [E, N, K]."""
    assert w.scale is not None
    word_NQ, scale_NG = w.data[which].view(torch.int16), w.scale[which]
    out_NK = torch.empty(w.shape[1:], dtype=torch.bfloat16, device=w.data.device)
    num_words = word_NQ.numel()
    _to_bf16[(triton.cdiv(num_words, _TILE),)](out_NK, word_NQ, scale_NG, num_words, TILE=_TILE)
    return out_NK
