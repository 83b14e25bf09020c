"""The indexer's rows from their products to where they are used: queries rotated and transformed, keys normed before
and inserted behind. One kernel each; a decode of DeepSeek-V3.2 launched sixteen small ones a layer before.

Roundings are those of the separate operators. The transform's sums are fp32.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from eprt.ops.cuda.cache import store_entry
from eprt.ops.elementwise import Rotation
from eprt.ops.index_format import IndexFormat

_HEADS = 64


@triton.jit
def _partner(i, half):
    """The other value of each one's pair; of those that are not rotated, itself."""
    return tl.where(i < half, i + half, tl.where(i < 2 * half, i - half, i))


@triton.jit
def _turned(value, other, angles, i, half):
    """value: of index i, last; other: its partner."""
    pair = tl.where(i < half, i, i - half)
    cos = tl.load(angles + pair, mask=i < 2 * half, other=1.0)
    sin = tl.load(angles + half + pair, mask=i < 2 * half, other=0.0)
    return value * cos + other * tl.where(i < half, -sin, sin)


@triton.jit
def hadamard_matrix(i, j, size):
    """fp32: 1 or -1 at row i and column j of the matrix of `size`, a power of 2; 0 outside it."""
    odd = i & j
    odd ^= odd >> 8
    odd ^= odd >> 4
    odd ^= odd >> 2
    odd ^= odd >> 1
    return tl.where((i < size) & (j < size), 1.0 - 2.0 * (odd & 1).to(tl.float32), 0.0)


@triton.jit
def _index_queries(
    out,
    query,
    cos_sin,
    position_X,
    row_stride,
    head_stride,
    num_heads,
    size,
    half,
    factor,
    TRANSFORM: tl.constexpr,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    i = tl.arange(0, SIZE)
    inside = (head < num_heads)[:, None] & (i < size)[None, :]
    at = query + row * row_stride + head[:, None] * head_stride
    angles = cos_sin + tl.load(position_X + row).to(tl.int64) * 2 * half
    value = tl.load(at + i[None, :], mask=inside, other=0.0).to(tl.float32)
    other = tl.load(at + _partner(i, half)[None, :], mask=inside, other=0.0).to(tl.float32)
    value = _turned(value, other, angles, i[None, :], half).to(out.dtype.element_ty)
    if TRANSFORM:
        matrix = hadamard_matrix(tl.arange(0, SIZE)[:, None], i[None, :], size).to(out.dtype.element_ty)
        value = (tl.dot(value, matrix, input_precision="ieee") * factor).to(out.dtype.element_ty)
    tl.store(out + (row * num_heads + head[:, None]) * size + i[None, :], value, mask=inside)


@triton.jit
def _index_key_insert(
    pages,
    slot_T,
    key,
    norm,
    bias,
    cos_sin,
    position_T,
    token_stride,
    eps,
    size,
    half,
    factor,
    entry_size,
    FP8: tl.constexpr,
    SIZE: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, SIZE)
    inside, partner = i < size, _partner(i, half)
    row = key + token * token_stride
    value = tl.load(row + i, mask=inside, other=0.0).to(tl.float32)
    other = tl.load(row + partner, mask=inside, other=0.0).to(tl.float32)
    mean = tl.sum(value, 0) / size
    centred = tl.where(inside, value - mean, 0.0)
    deviation = 1.0 / tl.sqrt_rn(tl.sum(centred * centred, 0) / size + eps)
    value = centred * deviation * tl.load(norm + i, mask=inside, other=0.0)
    value = (value + tl.load(bias + i, mask=inside, other=0.0)).to(key.dtype.element_ty).to(tl.float32)
    other = (other - mean) * deviation * tl.load(norm + partner, mask=inside, other=0.0)
    other = (other + tl.load(bias + partner, mask=inside, other=0.0)).to(key.dtype.element_ty).to(tl.float32)
    angles = cos_sin + tl.load(position_T + token).to(tl.int64) * 2 * half
    value = _turned(value, other, angles, i, half).to(key.dtype.element_ty).to(tl.float32)
    if FP8:
        matrix = hadamard_matrix(tl.arange(0, SIZE)[:, None], i[None, :], size)
        value = (tl.sum(matrix * value[None, :], 1) * factor).to(key.dtype.element_ty).to(tl.float32)
    entry = pages + tl.load(slot_T + token).to(tl.int64) * entry_size
    store_entry(entry, value, i, size, size, FP8)


def index_queries(query_XND: Tensor, rotation: Rotation, cache_dtype: torch.dtype) -> Tensor:
    """As eprt.ops.indexer.index_queries. Values of a head lie together."""
    _check(rotation)
    X, N, D = query_XND.shape
    out_XND = query_XND.new_empty(X, N, D)
    heads = min(_HEADS, max(16, triton.next_power_of_2(N)))
    if X:
        _index_queries[(X, triton.cdiv(N, heads))](
            out_XND,
            query_XND,
            rotation.cos_sin_PR,
            rotation.position_T,
            *query_XND.stride()[:2],
            N,
            D,
            rotation.cos_sin_PR.shape[1] // 2,
            D**-0.5,
            TRANSFORM=cache_dtype == torch.uint8,
            HEADS=heads,
            SIZE=max(16, triton.next_power_of_2(D)),
            num_warps=8,
        )
    return out_XND


def index_key_insert(
    key_pages: Tensor,
    kv_slot_T: Tensor,
    key_TD: Tensor,
    norm_D: Tensor,
    bias_D: Tensor,
    eps: float,
    rotation: Rotation,
) -> None:
    """As eprt.ops.indexer.index_key_insert. key_pages must be contiguous; slots are not checked."""
    _check(rotation)
    T, D = key_TD.shape
    entry = IndexFormat(D, key_pages.dtype)
    if T:
        _index_key_insert[(T,)](
            key_pages,
            kv_slot_T,
            key_TD,
            norm_D,
            bias_D,
            rotation.cos_sin_PR,
            rotation.position_T,
            key_TD.stride(0),
            eps,
            D,
            rotation.cos_sin_PR.shape[1] // 2,
            D**-0.5,
            entry.width,
            FP8=entry.is_fp8,
            SIZE=max(16, triton.next_power_of_2(D)),
            num_warps=8 if entry.is_fp8 else 4,
        )


def _check(rotation: Rotation) -> None:
    if rotation.interleaved:
        raise ValueError("the indexer's kernels rotate pairs (i, i + R/2), not neighbours (interleaved)")
