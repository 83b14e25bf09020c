"""The keys of DeepSeek-V4's attention as its kernel finds them: tokens side by side or in rings, entries in pages.

Keys of a query are numbered: its tokens first, then its entries. Knows nothing of what is done with them.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from eprt.ops.entry_format import EntryFormat
from eprt.ops.shared_attention import SeenEntries, SeenRing, SeenTokens


@triton.jit
def _stored_fp8(entry, known, size, DTYPE: tl.constexpr, PLAIN: tl.constexpr, KEYS: tl.constexpr, SIZE: tl.constexpr):
    """Entries of EntryFormat's bytes as DTYPE, which holds all their values. entry, known: [KEYS].

    An entry's scales are one word: of loads by the byte the compiler would take the layout for all values. What is
    rotated lies in one group of 64, so it is loaded once, not beside each group.
    """
    GROUPS: tl.constexpr = (SIZE + 63) // 64
    PLACES: tl.constexpr = SIZE // GROUPS
    FIRST: tl.constexpr = PLAIN % 64  # rotated place of its group
    group, place = tl.arange(0, GROUPS)[None, :, None], tl.arange(0, PLACES)[None, None, :]
    column, at, there = group * PLACES + place, entry[:, None, None], known[:, None, None]
    code = tl.load(at.to(tl.pointer_type(tl.float8e4nv)) + column, mask=there & (column < PLAIN), other=0.0)
    scales = tl.load((entry + PLAIN + 2 * (size - PLAIN)).to(tl.pointer_type(tl.int64)), mask=known, other=0)
    exponent = (scales[:, None, None] >> (8 * group)).to(tl.int32) & 0xFF
    value = code.to(tl.float32) * (exponent << 23).to(tl.float32, bitcast=True)
    turned = there & (place >= FIRST) & (place - FIRST < size - PLAIN)
    rope = tl.load((at + PLAIN).to(tl.pointer_type(tl.bfloat16)) + (place - FIRST), mask=turned, other=0.0)
    return tl.reshape(tl.where(column < PLAIN, value, rope.to(tl.float32)).to(DTYPE), [KEYS, SIZE])


@triton.jit
def load_keys(
    local,
    pages,
    at,
    where,
    DTYPE: tl.constexpr,
    stored: tl.constexpr,
    KEYS: tl.constexpr,
    SIZE: tl.constexpr,
):
    """[KEYS, SIZE] of DTYPE: the keys of numbers `at`; zeros from `end` on.

    where: (the query's first token, how many it sees, end, its slots if CHOSEN or else its pages, distance of pages,
    values of a key). stored: (CHOSEN, tokens of a ring or 0, entries of a page, elements of a key, its values that are
    not rotated, whether keys are fp8).
    """
    CHOSEN: tl.constexpr = stored[0]
    RING: tl.constexpr = stored[1]
    PAGE: tl.constexpr = stored[2]
    WIDTH: tl.constexpr = stored[3]
    PLAIN: tl.constexpr = stored[4]
    FP8: tl.constexpr = stored[5]
    first_token, num_local, end, chosen, entry_page, size = where
    is_local, known, i = at < num_local, at < end, tl.arange(0, SIZE)
    is_entry = known & (at >= num_local)
    number = tl.maximum(at - num_local, 0)
    if CHOSEN:
        slot = tl.load(chosen + number, mask=is_entry, other=0)
        page, place = (slot // PAGE).to(tl.int64), slot % PAGE
    else:
        page, place = tl.load(chosen + number // PAGE, mask=is_entry, other=0).to(tl.int64), number % PAGE
    token = first_token + tl.minimum(at, num_local)
    if RING > 0:
        token = token % RING
    from_local, from_pages = local + token * WIDTH, pages + page * entry_page + place * WIDTH
    if FP8:
        entry = tl.where(is_local, from_local, from_pages)
        return _stored_fp8(entry, known, size, DTYPE, PLAIN, KEYS, SIZE)
    inside = known[:, None]
    if SIZE != WIDTH:
        inside = inside & (i < size)[None, :]
    if local.dtype == pages.dtype:
        entry = tl.where(is_local, from_local, from_pages)
        return tl.load(entry[:, None] + i[None, :], mask=inside, other=0.0).to(DTYPE)
    else:
        of_local = tl.load(from_local[:, None] + i[None, :], mask=inside & is_local[:, None], other=0.0).to(DTYPE)
        of_pages = tl.load(from_pages[:, None] + i[None, :], mask=inside & is_entry[:, None], other=0.0).to(DTYPE)
        return tl.where(is_local[:, None], of_local, of_pages)


class SharedKeys:
    """What the kernel is told of a call's tokens and entries. ValueError for what it cannot read.

    size, rope_size: of a key. dtype: of queries.
    """

    def __init__(
        self, tokens: SeenTokens | SeenRing, entries: SeenEntries, size: int, rope_size: int, dtype: torch.dtype
    ):
        self.entry = EntryFormat(size, rope_size, entries.pages_PED.dtype)
        self.tokens, self.entries, width = tokens, entries, self.entry.width
        self.ring = tokens.pages_PSD.shape[1] if isinstance(tokens, SeenRing) else 0
        self.local = tokens.pages_PSD if isinstance(tokens, SeenRing) else tokens.local_XD
        pages_PED = entries.pages_PED
        local_dtype = torch.uint8 if self.entry.is_fp8 else dtype
        if self.local.dtype != local_dtype and not (self.ring and self.local.dtype == pages_PED.dtype):
            raise ValueError(f"tokens are {self.local.dtype}, must be {local_dtype} for entries of {pages_PED.dtype}")
        for name, x in (("tokens", self.local), ("entries", pages_PED)):
            if x.shape[-1] != width or x.stride()[-2:] != (width, 1):
                raise ValueError(f"{name} have shape {tuple(x.shape)}: must be rows of {width} side by side")
            if self.entry.is_fp8 and (x.stride(0) % 8 or x.data_ptr() % 8):
                raise ValueError(f"{name} in fp8 lie {x.stride(0)} bytes apart: must be a multiple of 8")
        plain = size - rope_size
        in_one_group = not rope_size or plain // 64 == (size - 1) // 64
        if self.entry.is_fp8 and not (in_one_group and (plain + 2 * rope_size) % 8 == 0 and size <= 512):
            raise ValueError(
                f"fp8 entries of {size} values, {rope_size} rotated: on GPUs up to 512 values, the rotated ones in one "
                f"group of 64, scales at a multiple of 8 bytes; use --kv-cache-dtype bf16"
            )

    @property
    def most(self) -> int:
        """Keys that a query may see, as far as shapes tell."""
        of_page, slots = self.entries.pages_PED.shape[1], self.entries.slot_TK
        entries = self.entries.table_BP.shape[1] * of_page if slots is None else slots.shape[1]
        return (self.ring or len(self.local)) + (entries if len(self.entries.pages_PED) else 0)

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        tokens, entries = self.tokens, self.entries
        page_T = tokens.page_T.contiguous() if isinstance(tokens, SeenRing) else None
        slot_TK = None if entries.slot_TK is None else entries.slot_TK.contiguous()
        rows = (each.contiguous() for each in (entries.table_BP, entries.request_T, entries.num_T))
        of_tokens = page_T, tokens.begin_T.contiguous(), tokens.end_T.contiguous()
        return self.local, *of_tokens, entries.pages_PED, *rows, slot_TK

    @property
    def strides(self) -> tuple[int, int, int, int]:
        """Of pages of tokens and of entries, of the table and of slots."""
        entries, slot_TK = self.entries, self.entries.slot_TK
        page, width = self.local.stride(0) if self.ring else 0, 0 if slot_TK is None else slot_TK.shape[1]
        return page, entries.pages_PED.stride(0), entries.table_BP.shape[1], width

    @property
    def constants(self) -> dict[str, Any]:
        plain = self.entry.size - self.entry.rope_size
        page, fp8 = self.entries.pages_PED.shape[1], self.entry.is_fp8
        return {"RING": self.ring, "PAGE": page, "WIDTH": self.entry.width, "PLAIN": plain, "FP8": fp8}
