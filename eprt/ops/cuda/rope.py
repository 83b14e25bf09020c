"""Rotary embedding: one program per token and group of heads, in fp32."""

import triton
import triton.language as tl
from torch import Tensor

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


def rope_interleaved(x_TNR: Tensor, cos_sin_PR: Tensor, position_T: Tensor) -> Tensor:
    return rotate(x_TNR, cos_sin_PR, position_T, interleaved=True)


def rope_half(x_TNR: Tensor, cos_sin_PR: Tensor, position_T: Tensor) -> Tensor:
    return rotate(x_TNR, cos_sin_PR, position_T, interleaved=False)


def rotate(
    x_TNR: Tensor, cos_sin_PR: Tensor, position_T: Tensor, interleaved: bool, out_TNR: Tensor | None = None
) -> Tensor:
    """out_TNR: where to write, with any strides over tokens and heads. Default: a new tensor."""
    tokens, heads, size = x_TNR.shape
    if out_TNR is None:
        out_TNR = x_TNR.new_empty(tokens, heads, size)
    if tokens:
        _rope[(tokens, triton.cdiv(heads, _HEADS))](
            out_TNR,
            x_TNR,
            cos_sin_PR,
            position_T,
            x_TNR.stride(0),
            x_TNR.stride(1),
            out_TNR.stride(0),
            out_TNR.stride(1),
            heads,
            size // 2,
            INTERLEAVED=interleaved,
            HEADS=_HEADS,
            HALF=triton.next_power_of_2(size // 2),
        )
    return out_TNR
