"""Rotary embedding: one program per token and group of heads, in fp32."""

import triton
import triton.language as tl
from torch import Tensor

from eprt.ops.elementwise import Rotation

_HEADS = 16


@triton.jit
def _rope(
    out,
    x,
    cos_sin,
    position,
    token_stride,
    head_stride,
    out_token_stride,
    out_head_stride,
    num_heads,
    half,
    INTERLEAVED: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    pair = tl.arange(0, HALF)
    angles = cos_sin + tl.load(position + token).to(tl.int64) * 2 * half
    cos = tl.load(angles + pair, mask=pair < half, other=0.0)[None, :]
    sin = tl.load(angles + half + pair, mask=pair < half, other=0.0)[None, :]
    row = x + token * token_stride + head[:, None] * head_stride
    to = out + token * out_token_stride + head[:, None] * out_head_stride
    if INTERLEAVED:  # load and store whole rows: every other value takes as many memory transactions
        column = tl.arange(0, 2 * HALF)
        inside = (head < num_heads)[:, None] & (column < 2 * half)[None, :]
        values = tl.load(row + column[None, :], mask=inside, other=0.0).to(tl.float32)
        a, b = tl.split(tl.reshape(values, [HEADS, HALF, 2]))
        turned = tl.reshape(tl.join(a * cos - b * sin, b * cos + a * sin), [HEADS, 2 * HALF])
        tl.store(to + column[None, :], turned.to(out.dtype.element_ty), mask=inside)
    else:
        inside = (head < num_heads)[:, None] & (pair < half)[None, :]
        a = tl.load(row + pair[None, :], mask=inside, other=0.0).to(tl.float32)
        b = tl.load(row + half + pair[None, :], mask=inside, other=0.0).to(tl.float32)
        tl.store(to + pair[None, :], (a * cos - b * sin).to(out.dtype.element_ty), mask=inside)
        tl.store(to + half + pair[None, :], (b * cos + a * sin).to(out.dtype.element_ty), mask=inside)


def rope(x_TNR: Tensor, rotation: Rotation) -> Tensor:
    return rotate(x_TNR, rotation, x_TNR.new_empty(x_TNR.shape))


def rotate(x_TNR: Tensor, rotation: Rotation, out_TNR: Tensor) -> Tensor:
    """Writes to out_TNR, of any strides over tokens and heads, and returns it."""
    tokens, heads, size = x_TNR.shape
    if tokens:
        _rope[(tokens, triton.cdiv(heads, _HEADS))](
            out_TNR,
            x_TNR,
            rotation.cos_sin_PR,
            rotation.position_T,
            *x_TNR.stride()[:2],
            *out_TNR.stride()[:2],
            heads,
            size // 2,
            INTERLEAVED=rotation.interleaved,
            HEADS=_HEADS,
            HALF=triton.next_power_of_2(size // 2),
        )
    return out_TNR
