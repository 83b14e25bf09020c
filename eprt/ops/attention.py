"""Multi-head latent attention over a paged latent cache, and the cache itself.

kv_pages: [num_pages, page_size, D] float32 or bfloat16, D = kv_lora_rank + rope: the normalised latent, then the
    rotated shared key; or fp8 entries, [num_pages, page_size, bytes] uint8 (KVFormat).
w_kv_b: float32 or bfloat16 [heads * (nope + value), kv_lora_rank], rows per head [nope | value].

Queries may be strided views whose last dimension is contiguous (such as the halves of one projection). Softmax and
accumulation are fp32. Products take bfloat16 inputs where queries and weight are bfloat16, the cache is bfloat16 or
fp8, and the CPU multiplies bfloat16 natively: the absorbed query, the expanded keys and values, the softmax weights and
the scaled fp8 latents are then rounded to bfloat16. Otherwise everything is fp32.

Each of the two operators is batch-invariant: a row has the same bits whatever else is in the batch, wherever its pages
lie, however the prompt was cut into chunks, and for any number of threads. mla_decode and mla_extend agree up to
rounding only: they order the same sums differently.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from eprt.ops import elementwise, native
from eprt.ops.elementwise import Rotation
from eprt.ops.kv_format import KVFormat

_DTYPES = (torch.float32, torch.bfloat16)


@dataclass(frozen=True)
class PagedContext:
    """The cached tokens of each request, to which its queries attend."""

    kv_pages: Tensor
    page_table_BP: Tensor  # int32 [B, P], the pages of each request in order; entries past its length are ignored
    seq_len_B: Tensor  # int32, tokens of each request, including its new ones, whose entries are already inserted
    # int32, the first query row of each request, and T; a request may have no new tokens. None: one row per request.
    query_start_B1: Tensor | None = None
    num_tokens: int | None = None  # the sum of seq_len_B or an upper bound, if the host knows one; for GPUs
    is_far: bool = False  # whether pages lie in another GPU's memory, so that each read crosses the link; for GPUs


def _check_dtype(name: str, x: Tensor, *allowed: torch.dtype) -> None:
    if x.dtype not in allowed:
        raise ValueError(f"{name} is {x.dtype}, must be {' or '.join(str(d) for d in allowed)}")


def _index(name: str, x: Tensor, ndim: int) -> Tensor:
    """x as the kernels read it: int32, contiguous."""
    _check_dtype(name, x, torch.int32, torch.int64)
    if x.dim() != ndim:
        raise ValueError(f"{name} has {x.dim()} dimensions, must have {ndim}")
    return x.to(torch.int32).contiguous()


def _rows(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _check_pages(kv_pages: Tensor) -> None:
    if kv_pages.dim() != 3:
        raise ValueError(f"kv_pages has shape {tuple(kv_pages.shape)}, must be [num_pages, page_size, D]")
    _check_dtype("kv_pages", kv_pages, *_DTYPES, torch.uint8)
    if kv_pages.stride(2) != 1:
        raise ValueError(f"kv_pages has strides {kv_pages.stride()}: the last dimension must be contiguous")


def cache_insert(kv_pages: Tensor, kv_slot_T: Tensor, kv_TD: Tensor, rope_size: int = 0) -> None:
    """Writes entry t at slot kv_slot_T[t] = page * page_size + offset.

    kv_slot_T: int32 or int64, all different. ValueError for a slot outside the pool; nothing is written then.
    kv_TD: float32 or bfloat16 [T, D], rounded to the cache's dtype.
    rope_size: how many of the D values are the rotated key; needed for fp8 pages.
    """
    _check_pages(kv_pages)
    _check_dtype("kv", kv_TD, *_DTYPES)
    _check_dtype("kv_slot", kv_slot_T, torch.int32, torch.int64)
    if kv_pages.dtype == torch.uint8:
        kv_TD = _fp8_entries(kv_TD, rope_size, kv_pages.shape[2])
        kv_pages = kv_pages.view(kv_TD.dtype)
    slot_T = _slots(kv_pages, kv_slot_T, kv_TD)
    bad = native.load().cache_insert(kv_pages, slot_T, _rows(kv_TD), torch.get_num_threads())
    if bad >= 0:
        raise _slot_outside(kv_pages, slot_T, bad)


def _slots(kv_pages: Tensor, kv_slot_T: Tensor, kv_TD: Tensor) -> Tensor:
    """The slots as kernels read them. ValueError unless there is one for each entry, and entries fit the pages."""
    kv_dim, num_tokens = kv_pages.shape[2], kv_slot_T.numel()
    if not (kv_slot_T.dim() == 1 and kv_TD.shape == (num_tokens, kv_dim)):
        raise ValueError(
            f"kv has shape {tuple(kv_TD.shape)} and kv_slot {tuple(kv_slot_T.shape)}: must be [T, {kv_dim}] and [T]"
        )
    return kv_slot_T.to(torch.int64).contiguous()


def _slot_outside(kv_pages: Tensor, slot_T: Tensor, row: int) -> ValueError:
    num_pages, page_size, _ = kv_pages.shape
    where = f"outside the cache of {num_pages} pages of {page_size} tokens"
    return ValueError(f"kv_slot[{row}] = {int(slot_T[row])} is {where}")


def _fp8_entries(kv_TD: Tensor, rope_size: int, width: int) -> Tensor:
    """fp8 entries, pairs of bytes viewed as bfloat16: they are copied to pages viewed the same way."""
    if rope_size < 1:
        raise ValueError(f"rope_size={rope_size}: an fp8 cache needs to know the rotated key's size")
    entry = KVFormat(kv_TD.shape[-1] - rope_size, rope_size, torch.uint8)
    if entry.width != width:
        raise ValueError(f"kv_pages has entries of {width} bytes; these of {kv_TD.shape[-1]} values take {entry.width}")
    return entry.encode(kv_TD).view(torch.bfloat16)


def latent_insert(
    kv_pages: Tensor, kv_slot_T: Tensor, kv_TD: Tensor, norm_weight_L: Tensor, eps: float, rotation: Rotation
) -> None:
    """Inserts each token's projection kv_TD: RMSNorm of the latent, rotation of the key, cache_insert.

    ValueError for a slot outside the pool and for a position outside the table; nothing is written then.
    """
    latent, width = norm_weight_L.numel(), kv_TD.shape[-1]
    if kv_pages.dtype == torch.uint8:
        latent_TL, k_rope_TR = kv_TD.split([latent, width - latent], dim=-1)
        k_rope_TR = elementwise.rope(k_rope_TR.unsqueeze(1), rotation).squeeze(1)
        entries_TD = torch.cat((elementwise.rms_norm(latent_TL, norm_weight_L, eps), k_rope_TR), dim=-1)
        return cache_insert(kv_pages, kv_slot_T, entries_TD, width - latent)
    _check_pages(kv_pages)
    _check_dtype("kv", kv_TD, *_DTYPES)
    _check_dtype("kv_slot", kv_slot_T, torch.int32, torch.int64)
    slot_T, weight = _slots(kv_pages, kv_slot_T, kv_TD), elementwise.checked_norm_weight(norm_weight_L, latent)
    table, position = rotation.checked(len(slot_T), width - latent)
    inputs, how = (_rows(kv_TD), weight, eps, table, position), (rotation.interleaved, torch.get_num_threads())
    bad = native.load().latent_insert(kv_pages, slot_T, *inputs, *how)
    if bad >= 0:
        raise _slot_outside(kv_pages, slot_T, bad) if bad < len(slot_T) else rotation.outside(bad - len(slot_T))


def norm_insert(
    q_TA: Tensor,
    q_norm_weight_A: Tensor,
    q_eps: float,
    kv_pages: Tensor,
    kv_slot_T: Tensor,
    kv_TD: Tensor,
    norm_weight_L: Tensor,
    eps: float,
    rotation: Rotation,
) -> Tensor:
    """The RMSNorm of query latents [T, A], and latent_insert of the same tokens' projections."""
    latent_insert(kv_pages, kv_slot_T, kv_TD, norm_weight_L, eps, rotation)
    return elementwise.rms_norm(q_TA, q_norm_weight_A, q_eps)


def _output(q_nope: Tensor, q_rope: Tensor, kv_pages: Tensor, w_kv_b: Tensor, softmax_scale: float) -> Tensor:
    """The empty result [T, N, value]. ValueError when shapes or dtypes do not fit each other."""
    _check_pages(kv_pages)
    for name, x in (("q_nope", q_nope), ("q_rope", q_rope)):
        if x.dim() != 3:
            raise ValueError(f"{name} has shape {tuple(x.shape)}, must be [tokens, heads, dim]")
    _check_dtype("q_nope", q_nope, *_DTYPES)
    _check_dtype("q_rope", q_rope, q_nope.dtype)
    _check_dtype("w_kv_b", w_kv_b, *_DTYPES)
    num_tokens, num_heads, nope = q_nope.shape
    if q_rope.shape[:2] != q_nope.shape[:2]:
        raise ValueError(f"q_nope {tuple(q_nope.shape)} and q_rope {tuple(q_rope.shape)} differ in tokens or heads")
    fp8 = kv_pages.dtype == torch.uint8
    lora = w_kv_b.shape[-1] if fp8 else kv_pages.shape[2] - q_rope.shape[2]
    width = KVFormat(lora, q_rope.shape[2], kv_pages.dtype).width
    if kv_pages.shape[2] != width:
        raise ValueError(
            f"kv_pages has entries of {kv_pages.shape[2]} bytes; {lora} + {q_rope.shape[2]} values take {width} in fp8"
        )
    if not (lora >= 1 and w_kv_b.dim() == 2 and w_kv_b.shape[1] == lora and w_kv_b.is_contiguous()):
        raise ValueError(
            f"w_kv_b has shape {tuple(w_kv_b.shape)}, must be contiguous [heads * (nope + value), {lora}]: the cache "
            f"holds {kv_pages.shape[2]} values per token, of which q_rope's {q_rope.shape[2]} are rotated"
        )
    value = w_kv_b.shape[0] // max(num_heads, 1) - nope
    if not (num_heads >= 1 and value >= 1 and w_kv_b.shape[0] == num_heads * (nope + value)):
        raise ValueError(f"w_kv_b has {w_kv_b.shape[0]} rows: not [nope={nope} | value] for each of {num_heads} heads")
    if not (softmax_scale > 0):
        raise ValueError(f"softmax_scale={softmax_scale}: must be above 0")
    return q_nope.new_empty(num_tokens, num_heads, value)


def _explain(
    b: int, kv_pages: Tensor, page_table_BP: Tensor, seq_len_B: Tensor, first: int, end: int, total: int
) -> str:
    """The error message for request b, whose query rows are first..end of `total`."""
    num_pages, page_size, _ = kv_pages.shape
    seq_len = int(seq_len_B[b])
    rises = 0 <= first <= end <= total
    if not rises or (b == 0 and first > 0) or (b == len(seq_len_B) - 1 and end < total):
        return f"request {b}: query_start gives it rows {first}..{end} of {total}; must rise from 0 to {total}"
    if end - first > seq_len:
        return f"request {b}: seq_len is {seq_len}, which must count its {end - first} new tokens"
    needed = -(-seq_len // page_size)
    if needed > page_table_BP.shape[1]:
        return (
            f"request {b}: {seq_len} tokens need {needed} pages of {page_size}, page_table has {page_table_BP.shape[1]}"
        )
    pages = page_table_BP[b, :needed].tolist()
    i = next(i for i, page in enumerate(pages) if not 0 <= page < num_pages)
    return f"request {b}: page_table[{b}, {i}] = {pages[i]} is outside the cache of {num_pages} pages"


def mla_decode(
    q_nope_BNC: Tensor,
    q_rope_BNR: Tensor,
    context: PagedContext,
    w_kv_b: Tensor,
    softmax_scale: float,
    rotation: Rotation | None = None,
    plans: dict[str, Any] | None = None,
) -> Tensor:
    """One new token per request, absorbed form: [B, N, value]. Split-KV in two phases; heads folded into the GEMM.

    rotation: of q_rope, if it is not rotated yet.
    plans: what kernels derived from seq_len_B, shared by the layers of one step: a dict that is empty for the first
        layer. For GPUs, unused here.
    ValueError when a request's pages or length do not fit the cache; nothing is computed then.
    """
    kv_pages = context.kv_pages
    out_BNV = _output(q_nope_BNC, q_rope_BNR, kv_pages, w_kv_b, softmax_scale)
    table, seq_len = _index("page_table", context.page_table_BP, 2), _index("seq_len", context.seq_len_B, 1)
    batch = out_BNV.shape[0]
    if not (table.shape[0] == seq_len.shape[0] == batch):
        raise ValueError(
            f"{batch} queries, but page_table has {table.shape[0]} requests and seq_len {seq_len.shape[0]}"
        )
    q = _rows(q_nope_BNC), _rows(q_rope_BNR)
    turn = (None, None, False)
    if rotation is not None:
        turn = *rotation.checked(batch, q_rope_BNR.shape[2]), rotation.interleaved
    bad = native.load().mla_decode(
        *q, kv_pages, table, seq_len, w_kv_b, softmax_scale, *turn, out_BNV, torch.get_num_threads()
    )
    if bad >= batch and rotation is not None:
        raise rotation.outside(bad - batch)
    if bad >= 0:
        raise ValueError(_explain(bad, kv_pages, table, seq_len, bad, bad + 1, batch))
    return out_BNV


def mla_extend(
    q_nope_TNC: Tensor,
    q_rope_TNR: Tensor,
    context: PagedContext,
    w_kv_b: Tensor,
    softmax_scale: float,
    plans: dict[str, Any] | None = None,
) -> Tensor:
    """Attention of each request's last tokens, packed: [T, N, value]. The context names the rows of each request.

    Scores of the cached prefix are a rectangle, those of the chunk a causal triangle; they are never materialised.
    plans: as of mla_decode, but a dict of its own.
    ValueError when rows, pages or lengths do not fit; nothing is computed then.
    """
    kv_pages = context.kv_pages
    out_TNV = _output(q_nope_TNC, q_rope_TNR, kv_pages, w_kv_b, softmax_scale)
    table, seq_len = _index("page_table", context.page_table_BP, 2), _index("seq_len", context.seq_len_B, 1)
    assert context.query_start_B1 is not None
    start = _index("query_start", context.query_start_B1, 1)
    batch = seq_len.shape[0]
    if not (table.shape[0] == batch and start.shape[0] == batch + 1 and (batch > 0 or out_TNV.shape[0] == 0)):
        raise ValueError(
            f"{out_TNV.shape[0]} tokens of {batch} requests, but page_table has {table.shape[0]} requests and "
            f"query_start {start.shape[0]} entries (one more than requests)"
        )
    q = _rows(q_nope_TNC), _rows(q_rope_TNR)
    bad = native.load().mla_extend(
        *q, kv_pages, table, seq_len, start, w_kv_b, softmax_scale, out_TNV, torch.get_num_threads()
    )
    if bad >= 0:
        rows = (int(start[bad]), int(start[bad + 1]), out_TNV.shape[0])
        raise ValueError(_explain(bad, kv_pages, table, seq_len, *rows))
    return out_TNV
