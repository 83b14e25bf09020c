"""Writes entries into the paged latent cache."""

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _cache_insert(pages, slot_T, kv, token_stride, size, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    slot = tl.load(slot_T + token).to(tl.int64)
    value = tl.load(kv + token * token_stride + column, mask=column < size, other=0.0)
    tl.store(pages + slot * size + column, value.to(pages.dtype.element_ty), mask=column < size)


def cache_insert(kv_pages: Tensor, kv_slot_T: Tensor, kv_TD: Tensor) -> None:
    """kv_pages must be contiguous. Slots are not checked."""
    tokens, size = kv_TD.shape
    if not kv_pages.is_contiguous() or kv_pages.shape[2] != size:
        raise ValueError(f"kv_pages is {tuple(kv_pages.shape)}: it must be contiguous [pages, page_size, {size}]")
    if tokens:
        _cache_insert[(tokens,)](kv_pages, kv_slot_T, kv_TD, kv_TD.stride(0), size, BLOCK=triton.next_power_of_2(size))
