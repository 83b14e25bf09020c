"""Writes entries into the paged latent cache."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from eprt.ops.kv_format import SMALLEST_SCALE, KVFormat

_SMALLEST = tl.constexpr(SMALLEST_SCALE)


@triton.jit
def _cache_insert(pages, slot_T, kv, token_stride, size, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    slot = tl.load(slot_T + token).to(tl.int64)
    value = tl.load(kv + token * token_stride + column, mask=column < size, other=0.0)
    tl.store(pages + slot * size + column, value.to(pages.dtype.element_ty), mask=column < size)


@triton.jit
def _cache_insert_fp8(
    pages, slot_T, kv, token_stride, latent_size, rope_size, entry_size, LATENT: tl.constexpr, ROPE: tl.constexpr
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    i, j = tl.arange(0, LATENT), tl.arange(0, ROPE)
    entry = pages + tl.load(slot_T + token).to(tl.int64) * entry_size
    latent = tl.load(kv + token * token_stride + i, mask=i < latent_size, other=0.0).to(tl.float32)
    rope = tl.load(kv + token * token_stride + latent_size + j, mask=j < rope_size, other=0.0)
    scale = tl.maximum(tl.max(tl.abs(latent), 0) / 448.0, _SMALLEST)
    tl.store(entry.to(tl.pointer_type(tl.float8e4nv)) + i, (latent / scale).to(tl.float8e4nv), mask=i < latent_size)
    tl.store((entry + latent_size).to(tl.pointer_type(tl.bfloat16)) + j, rope.to(tl.bfloat16), mask=j < rope_size)
    tl.store((entry + latent_size + 2 * rope_size).to(tl.pointer_type(tl.float32)), scale)


def cache_insert(kv_pages: Tensor, kv_slot_T: Tensor, kv_TD: Tensor, rope_size: int = 0) -> None:
    """kv_pages must be contiguous. Slots are not checked. rope_size: of each entry; needed for fp8 pages."""
    tokens, size = kv_TD.shape
    fp8 = kv_pages.dtype == torch.uint8
    entry = KVFormat(size - rope_size, rope_size, kv_pages.dtype)
    if not kv_pages.is_contiguous() or kv_pages.shape[2] != entry.width or (fp8 and rope_size < 1):
        raise ValueError(
            f"kv_pages is {kv_pages.dtype} {tuple(kv_pages.shape)}: it must be contiguous [pages, page_size, "
            f"{entry.width}] for entries of {size} values, {rope_size} of them rotated"
        )
    if not tokens:
        return
    where = kv_pages, kv_slot_T, kv_TD, kv_TD.stride(0)
    if fp8:
        blocks = {"LATENT": triton.next_power_of_2(size - rope_size), "ROPE": triton.next_power_of_2(rope_size)}
        _cache_insert_fp8[(tokens,)](*where, size - rope_size, rope_size, entry.width, **blocks)
    else:
        _cache_insert[(tokens,)](*where, size, BLOCK=triton.next_power_of_2(size))
