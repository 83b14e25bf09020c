"""Writes entries to the paged latent cache."""

import triton
import triton.language as tl
from torch import Tensor

from eprt.ops.elementwise import Rotation
from eprt.ops.kv_format import SMALLEST_SCALE, KVFormat

_SMALLEST = tl.constexpr(SMALLEST_SCALE)


@triton.jit
def store_entry(entry, latent, i, latent_size, scale_at, FP8: tl.constexpr):
    """Stores the fp32 latent of one entry, and in fp8 its scale. Returns what the rotated key is multiplied by.

    scale_at: byte offset of the scale.
    """
    factor = 1.0
    if FP8:
        least = tl.max(tl.abs(latent), 0) / 448.0
        power_of_2 = ((least.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
        scale = tl.maximum(power_of_2, _SMALLEST)
        factor = 1.0 / scale
        tl.store(
            entry.to(tl.pointer_type(tl.float8e4nv)) + i, (latent * factor).to(tl.float8e4nv), mask=i < latent_size
        )
        tl.store((entry + scale_at).to(tl.pointer_type(tl.float32)), scale)
    else:
        tl.store(entry + i, latent.to(entry.dtype.element_ty), mask=i < latent_size)
    return factor


@triton.jit
def _rope_of(entry, latent_size, FP8: tl.constexpr):
    """The address of an entry's rotated key."""
    if FP8:
        return (entry + latent_size).to(tl.pointer_type(tl.bfloat16))
    else:
        return entry + latent_size


@triton.jit
def _cache_insert(
    pages,
    slot_T,
    kv,
    token_stride,
    latent_size,
    rope_size,
    entry_size,
    FP8: tl.constexpr,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    i, j = tl.arange(0, LATENT), tl.arange(0, ROPE)
    entry = pages + tl.load(slot_T + token).to(tl.int64) * entry_size
    latent = tl.load(kv + token * token_stride + i, mask=i < latent_size, other=0.0).to(tl.float32)
    rope = tl.load(kv + token * token_stride + latent_size + j, mask=j < rope_size, other=0.0)
    factor = store_entry(entry, latent, i, latent_size, latent_size + 2 * rope_size, FP8)
    rope_at = _rope_of(entry, latent_size, FP8)
    tl.store(rope_at + j, (rope.to(tl.float32) * factor).to(rope_at.dtype.element_ty), mask=j < rope_size)


@triton.jit
def latent_insert_kernel(
    pages,
    slot_T,
    kv,
    weight,
    cos_sin,
    position_T,
    token_stride,
    eps,
    latent_size,
    half,
    entry_size,
    FP8: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    LATENT: tl.constexpr,
    HALF: tl.constexpr,
):
    """Norm, rotation and insertion of one token. Rounds where the separate operators round."""
    token = tl.program_id(0).to(tl.int64)
    i, pair = tl.arange(0, LATENT), tl.arange(0, HALF)
    entry = pages + tl.load(slot_T + token).to(tl.int64) * entry_size
    row = kv + token * token_stride
    value = tl.load(row + i, mask=i < latent_size, other=0.0).to(tl.float32)
    factor = tl.load(weight + i, mask=i < latent_size, other=0.0).to(tl.float32)
    value = value * (1.0 / tl.sqrt_rn(tl.sum(value * value) / latent_size + eps)) * factor
    latent = value.to(kv.dtype.element_ty).to(tl.float32)
    scaling = store_entry(entry, latent, i, latent_size, latent_size + 4 * half, FP8)
    angles = cos_sin + tl.load(position_T + token).to(tl.int64) * 2 * half
    cos = tl.load(angles + pair, mask=pair < half, other=0.0)
    sin = tl.load(angles + half + pair, mask=pair < half, other=0.0)
    first = 2 * pair if INTERLEAVED else pair
    second = first + 1 if INTERLEAVED else first + half
    a = tl.load(row + latent_size + first, mask=pair < half, other=0.0).to(tl.float32)
    b = tl.load(row + latent_size + second, mask=pair < half, other=0.0).to(tl.float32)
    rope_at = _rope_of(entry, latent_size, FP8)
    low, high = (a * cos - b * sin).to(kv.dtype.element_ty), (b * cos + a * sin).to(kv.dtype.element_ty)
    low, high = low.to(tl.float32) * scaling, high.to(tl.float32) * scaling
    tl.store(rope_at + first, low.to(rope_at.dtype.element_ty), mask=pair < half)
    tl.store(rope_at + second, high.to(rope_at.dtype.element_ty), mask=pair < half)


def cache_insert(kv_pages: Tensor, kv_slot_T: Tensor, kv_TD: Tensor, rope_size: int = 0) -> None:
    """As eprt.ops.attention.cache_insert. kv_pages must be contiguous; slots are not checked."""
    entry = entry_of(kv_pages, kv_TD.shape[1], rope_size)
    insert_entries(kv_pages, kv_slot_T, kv_TD, rope_size, entry.width, entry.is_fp8)


def insert_entries(
    pages: Tensor, kv_slot_T: Tensor, kv_TD: Tensor, rope_size: int, entry_width: int, is_fp8: bool
) -> None:
    """Entries of so many elements; in fp8 the scale lies behind all values."""
    tokens, size = kv_TD.shape
    if tokens:
        _cache_insert[(tokens,)](
            pages,
            kv_slot_T,
            kv_TD,
            kv_TD.stride(0),
            size - rope_size,
            rope_size,
            entry_width,
            FP8=is_fp8,
            LATENT=triton.next_power_of_2(size - rope_size),
            ROPE=triton.next_power_of_2(max(1, rope_size)),
        )


def latent_insert(
    kv_pages: Tensor, kv_slot_T: Tensor, kv_TD: Tensor, norm_weight_L: Tensor, eps: float, rotation: Rotation
) -> None:
    """As eprt.ops.attention.latent_insert, in one kernel. kv_pages must be contiguous; slots are not checked."""
    tokens, size = kv_TD.shape
    latent_size = norm_weight_L.shape[0]
    entry = entry_of(kv_pages, size, size - latent_size)
    half = (size - latent_size) // 2
    if tokens:
        latent_insert_kernel[(tokens,)](
            kv_pages,
            kv_slot_T,
            kv_TD,
            norm_weight_L,
            rotation.cos_sin_PR,
            rotation.position_T,
            kv_TD.stride(0),
            eps,
            latent_size,
            half,
            entry.width,
            FP8=entry.is_fp8,
            INTERLEAVED=rotation.interleaved,
            LATENT=triton.next_power_of_2(latent_size),
            HALF=triton.next_power_of_2(half),
        )


def entry_of(kv_pages: Tensor, size: int, rope_size: int) -> KVFormat:
    """Of pages of entries of `size` values. ValueError when they have another width or are not contiguous."""
    entry = KVFormat(size - rope_size, rope_size, kv_pages.dtype)
    if not kv_pages.is_contiguous() or kv_pages.shape[2] != entry.width or (entry.is_fp8 and rope_size < 1):
        raise ValueError(
            f"kv_pages is {kv_pages.dtype} {tuple(kv_pages.shape)}: it must be contiguous [pages, page_size, "
            f"{entry.width}] for entries of {size} values, {rope_size} of them rotated"
        )
    return entry
