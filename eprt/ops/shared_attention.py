"""DeepSeek-V4's attention on CPUs: keys that are values too and serve all heads; and the pooling of its entries.

T queries, N heads, D values of a key, X tokens, P pages of entries or rings, S slots of a ring, B requests. Each row is
computed alone and its keys are summed in their order, so its bits depend neither on the batch, nor on the chunk, nor on
the number of threads. Knows nothing of who owns pages.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from eprt.ops import native
from eprt.ops.elementwise import Rotation
from eprt.ops.entry_format import EntryFormat
from eprt.ops.turned_rows import turn_rows

_DTYPES = (torch.float32, torch.bfloat16)


@dataclass(frozen=True)
class SeenTokens:
    """Tokens side by side, of which each query sees some consecutive ones."""

    local_XD: Tensor  # in the queries' dtype, or as entries are stored where that is fp8
    begin_T: Tensor  # int64
    end_T: Tensor  # int64, behind the last


@dataclass(frozen=True)
class SeenRing:
    """Tokens where they are kept, in rings by position: what decodes see without copying it."""

    pages_PSD: Tensor  # as entries are stored; pages may lie apart
    page_T: Tensor  # int64, each query's
    begin_T: Tensor  # int64: positions, of which the place in the ring is the remainder by S
    end_T: Tensor  # int64, behind the last

    def copied(self, dtype: torch.dtype) -> SeenTokens:
        """Each query's side by side. dtype: of queries, which tokens get unless they are fp8."""
        length_T = self.end_T - self.begin_T
        end_T = length_T.cumsum(0)
        query_X = torch.arange(len(length_T)).repeat_interleave(length_T)
        position_X = torch.arange(len(query_X)) - (end_T - length_T - self.begin_T)[query_X]
        local_XD = self.pages_PSD[self.page_T[query_X], position_X % self.pages_PSD.shape[1]]
        if local_XD.dtype != torch.uint8:
            local_XD = local_XD.to(dtype)
        return SeenTokens(local_XD, end_T - length_T, end_T)


@dataclass(frozen=True)
class SeenEntries:
    """Entries in pages, of which each query sees the first ones of its request, or those in its slots."""

    pages_PED: Tensor  # float32, bfloat16, or uint8 for fp8 (EntryFormat); E entries a page; pages may lie apart
    table_BP: Tensor  # int64, pages of each request
    request_T: Tensor  # int32, row of the table
    num_T: Tensor  # int32, how many
    slot_TK: Tensor | None = None  # int32: page * E + place in the page


def shared_attention(
    query_TND: Tensor,
    tokens: SeenTokens | SeenRing,
    entries: SeenEntries,
    sink_N: Tensor,
    scale: float,
    rope_size: int = 0,
) -> Tensor:
    """fp32 [T, N, D]. sink_N: fp32, takes a share of each softmax and gives nothing. rope_size: how many of the D
    values are rotated; needed for fp8. ValueError when shapes or dtypes do not fit, or a query sees what there is not;
    nothing is computed then."""
    T, N, D = query_TND.shape
    if isinstance(tokens, SeenRing):
        tokens = tokens.copied(query_TND.dtype)
    local_XD, pages_PED = tokens.local_XD, entries.pages_PED
    stored = EntryFormat(D, rope_size, pages_PED.dtype)
    _check(
        query_TND.dtype in _DTYPES
        and local_XD.dtype == (torch.uint8 if stored.is_fp8 else query_TND.dtype)
        and local_XD.shape[1:] == (stored.width,),
        f"query is {query_TND.dtype} {tuple(query_TND.shape)}, tokens {local_XD.dtype} {tuple(local_XD.shape)}: must "
        f"be [T, N, D] and [X, {stored.width}], both torch.float32 or torch.bfloat16, or tokens in fp8 as entries are",
    )
    _check(
        pages_PED.dtype in (*_DTYPES, torch.uint8)
        and pages_PED.dim() == 3
        and pages_PED.stride()[1:] == (stored.width, 1)
        and pages_PED.shape[2] == stored.width,
        f"pages are {pages_PED.dtype} {tuple(pages_PED.shape)}: must be [P, E, {stored.width}], each page contiguous",
    )
    _check(sink_N.shape == (N,) and sink_N.dtype == torch.float32, f"sink must be torch.float32 [{N}]")
    rows = tokens.begin_T, tokens.end_T, entries.request_T, entries.num_T
    _check(all(row.shape == (T,) for row in rows), f"{T} queries, but {[tuple(row.shape) for row in rows]} bounds")
    slot_TK = None if entries.slot_TK is None else entries.slot_TK.contiguous()
    _check(slot_TK is None or (slot_TK.dtype == torch.int32 and len(slot_TK) == T), f"slots must be int32 [{T}, K]")
    begin_T, end_T, table_BP = (x.long().contiguous() for x in (tokens.begin_T, tokens.end_T, entries.table_BP))
    request_T, num_T = (x.int().contiguous() for x in (entries.request_T, entries.num_T))
    out_TND = torch.empty(T, N, D)
    seen_tokens = local_XD.contiguous(), begin_T, end_T
    seen_entries = pages_PED, table_BP, request_T, num_T, slot_TK
    threads = torch.get_num_threads()
    bad = native.load().shared_attention(
        query_TND.contiguous(), *seen_tokens, *seen_entries, sink_N.contiguous(), scale, rope_size, out_TND, threads
    )
    if bad >= 0:
        raise ValueError(
            f"query {bad}: sees tokens {begin_T[bad]} to {end_T[bad]} of {len(local_XD)} and {num_T[bad]} entries of "
            f"request {request_T[bad]}; there are {len(table_BP)} requests of up to {table_BP.shape[1]} pages of "
            f"{pages_PED.shape[1]} entries, and pages must be below {len(pages_PED)}"
        )
    return out_TND


def turned_attention(
    query_TND: Tensor,
    tokens: SeenTokens | SeenRing,
    entries: SeenEntries,
    sink_N: Tensor,
    scale: float,
    rotation: Rotation,
    dtype: torch.dtype,
) -> Tensor:
    """shared_attention's output with its last values turned back by each query's rotation, in this dtype."""
    rope_size = rotation.cos_sin_PR.shape[1]
    out_TND = shared_attention(query_TND, tokens, entries, sink_N, scale, rope_size)
    return turn_rows(out_TND, rotation, backwards=True, dtype=dtype)


def pool_entries(state_S2C: Tensor, index_XR: Tensor, entry_size: int, first_slots: int) -> Tensor:
    """fp32 [entries, entry_size]: each from R tokens, by a softmax over them in each channel.

    state_S2C: fp32, values and gates of each token; or [P, S, 2, C], of rings, whose pages may lie apart.
    index_XR: int64, the tokens of each entry, of rings page * S + place; -1 for none.
    first_slots: of so many tokens, from the left, the first channels are taken, of the others the last.
    ValueError when shapes or dtypes do not fit.
    """
    state_PS2C = paged_states(state_S2C, entry_size)
    _check(index_XR.dim() == 2 and index_XR.dtype == torch.int64, "index must be int64 [X, R]")
    if state_S2C.dim() == 4:
        state_S2C, index_XR = _gathered(state_PS2C, index_XR)
    out_XD = torch.empty(len(index_XR), entry_size)
    state_S2C, index_XR = state_S2C.contiguous(), index_XR.contiguous()
    bad = native.load().pool_entries(state_S2C, index_XR, first_slots, out_XD, torch.get_num_threads())
    _check(bad < 0, f"entry {bad}: one of its tokens is not in -1..{len(state_S2C) - 1}")
    return out_XD


def paged_states(state: Tensor, entry_size: int) -> Tensor:
    """[P, S, 2, C], a view. ValueError for what pool_entries does not take."""
    paged = state.unsqueeze(0) if state.dim() == 3 else state
    _check(
        paged.dtype == torch.float32 and paged.dim() == 4 and paged.shape[2] == 2 and paged.stride(3) == 1,
        f"state is {state.dtype} {tuple(state.shape)}, must be torch.float32 [S, 2, C] or [P, S, 2, C]",
    )
    _check(entry_size <= paged.shape[3], f"an entry of {entry_size} values from {paged.shape[3]} channels")
    return paged


def _gathered(state_PS2C: Tensor, index_XR: Tensor) -> tuple[Tensor, Tensor]:
    """(what the index names, side by side; the index into it)."""
    num_pages, size = state_PS2C.shape[:2]
    beyond = (index_XR >= num_pages * size).any(1)
    bad = int(beyond.int().argmax()) if beyond.any() else -1
    _check(bad < 0, f"entry {bad}: one of its tokens is not in -1..{num_pages * size - 1}")
    named = index_XR >= 0
    token_Y = index_XR[named]
    near_XR = torch.full_like(index_XR, -1)
    near_XR[named] = torch.arange(len(token_Y))
    return state_PS2C[token_Y // size, token_Y % size], near_XR


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)
