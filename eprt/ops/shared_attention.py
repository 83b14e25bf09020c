"""DeepSeek-V4's attention on CPUs: keys that are values too and serve all heads; and the pooling of its entries.

T queries, N heads, D values of a key, X tokens, P pages of entries, B requests. Each row is computed alone and its keys
are summed in their order, so its bits depend neither on the batch, nor on the chunk, nor on the number of threads.
Knows nothing of who owns pages.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from eprt.ops import native
from eprt.ops.entry_format import EntryFormat

_DTYPES = (torch.float32, torch.bfloat16)


@dataclass(frozen=True)
class SeenTokens:
    """Tokens side by side, of which each query sees some consecutive ones."""

    local_XD: Tensor  # in the queries' dtype, or as entries are stored where that is fp8
    begin_T: Tensor  # int64
    end_T: Tensor  # int64, behind the last


@dataclass(frozen=True)
class SeenEntries:
    """Entries in pages, of which each query sees the first ones of its request, or those in its slots."""

    pages_PED: Tensor  # float32, bfloat16, or uint8 for fp8 (EntryFormat); E entries a page; pages may lie apart
    table_BP: Tensor  # int64, pages of each request
    request_T: Tensor  # int32, row of the table
    num_T: Tensor  # int32, how many
    slot_TK: Tensor | None = None  # int32: page * E + place in the page


def shared_attention(
    query_TND: Tensor, tokens: SeenTokens, entries: SeenEntries, sink_N: Tensor, scale: float, rope_size: int = 0
) -> Tensor:
    """fp32 [T, N, D]. sink_N: fp32, takes a share of each softmax and gives nothing. rope_size: how many of the D
    values are rotated; needed for fp8. ValueError when shapes or dtypes do not fit, or a query sees what there is not;
    nothing is computed then."""
    T, N, D = query_TND.shape
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


def pool_entries(state_S2C: Tensor, index_XR: Tensor, entry_size: int, first_slots: int) -> Tensor:
    """fp32 [entries, entry_size]: each from R tokens, by a softmax over them in each channel.

    state_S2C: fp32, values and gates of each token.
    index_XR: int64, the tokens of each entry; -1 for none.
    first_slots: of so many tokens, from the left, the first channels are taken, of the others the last.
    ValueError when shapes or dtypes do not fit.
    """
    _check(
        state_S2C.dtype == torch.float32 and state_S2C.dim() == 3 and state_S2C.shape[1] == 2,
        f"state is {state_S2C.dtype} {tuple(state_S2C.shape)}, must be torch.float32 [S, 2, C]",
    )
    _check(entry_size <= state_S2C.shape[2], f"an entry of {entry_size} values from {state_S2C.shape[2]} channels")
    _check(index_XR.dim() == 2 and index_XR.dtype == torch.int64, "index must be int64 [X, R]")
    out_XD = torch.empty(len(index_XR), entry_size)
    state_S2C, index_XR = state_S2C.contiguous(), index_XR.contiguous()
    bad = native.load().pool_entries(state_S2C, index_XR, first_slots, out_XD, torch.get_num_threads())
    _check(bad < 0, f"entry {bad}: one of its tokens is not in -1..{len(state_S2C) - 1}")
    return out_XD


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)
