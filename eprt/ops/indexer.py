"""The indexer of DeepSeek-V3.2's sparse attention: its cache of keys, the choice of tokens, attention to the chosen.

key_pages: [num_pages, page_size, width] float32, bfloat16, or uint8 for fp8 and fp4 keys (IndexFormat).

A query's choice is its own: its scores have the same bits in any batch and chunk, and of equal scores that of the lower
position goes first. Scores are fp32; their products take bfloat16 inputs where query and keys are bfloat16 (or the keys
fp8 or fp4) and the CPU multiplies bfloat16 natively.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from eprt.ops import attention, elementwise, native
from eprt.ops import linear as products
from eprt.ops.attention import PagedContext
from eprt.ops.elementwise import Rotation
from eprt.ops.index_format import IndexFormat, hadamard
from eprt.ops.weight import Weight

_DTYPES = (torch.float32, torch.bfloat16)


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def index_insert(key_pages: Tensor, kv_slot_T: Tensor, key_TD: Tensor) -> None:
    """Writes each token's key, rotated, and transformed for fp8 pages, at its slot: page * page_size + offset.

    ValueError for a slot outside the pool; nothing is written then.
    """
    entry = IndexFormat(key_TD.shape[-1], key_pages.dtype)
    _check(
        key_pages.dim() == 3 and key_pages.shape[2] == entry.width,
        f"key_pages is {tuple(key_pages.shape)}, must be [pages, page_size, {entry.width}] for {entry.size} values",
    )
    keys = entry.encode(key_TD)
    if entry.is_fp8:  # bytes are copied two at a time
        key_pages, keys = key_pages.view(torch.bfloat16), keys.view(torch.bfloat16)
    attention.cache_insert(key_pages, kv_slot_T, keys)


def index_key_insert(
    key_pages: Tensor,
    kv_slot_T: Tensor,
    key_TD: Tensor,
    norm_D: Tensor,
    bias_D: Tensor,
    eps: float,
    rotation: Rotation,
) -> None:
    """Inserts each token's product key_TD: LayerNorm in fp32, then as index_queries has queries, then index_insert.

    norm_D, bias_D: fp32.
    """
    key_TD = F.layer_norm(key_TD.float(), key_TD.shape[1:], norm_D, bias_D, eps).to(key_TD.dtype)
    index_insert(key_pages, kv_slot_T, index_queries(key_TD.unsqueeze(1), rotation, key_pages.dtype).squeeze(1))


def index_queries(query_XND: Tensor, rotation: Rotation, cache_dtype: torch.dtype) -> Tensor:
    """[X, N, D], as index_topk takes them: the first values of each head rotated, by pairs (i, i + R/2); transformed
    where the cache has fp8 keys (torch.uint8)."""
    return as_cached(_rotated(query_XND, rotation), cache_dtype)


def as_cached(x_XND: Tensor, cache_dtype: torch.dtype) -> Tensor:
    """Queries or keys, transformed where the cache has fp8 or fp4 keys (torch.uint8)."""
    if cache_dtype != torch.uint8:
        return x_XND
    size = x_XND.shape[2]
    matrix = Weight(hadamard(size, x_XND.dtype, x_XND.device))
    product = products.linear(x_XND.reshape(-1, size), matrix, None, torch.float32) * size**-0.5
    return product.view(x_XND.shape).to(x_XND.dtype)


def _rotated(x_XND: Tensor, rotation: Rotation) -> Tensor:
    turning = rotation.cos_sin_PR.shape[1]
    turned, rest = x_XND.split([turning, x_XND.shape[2] - turning], dim=-1)
    return torch.cat((elementwise.rope(turned, rotation), rest), dim=-1)


def index_topk(
    query_TND: Tensor,
    weight_TN: Tensor,
    key_pages: Tensor,
    page_table_BP: Tensor,
    request_T: Tensor,
    length_T: Tensor,
    top_k: int,
) -> Tensor:
    """int32 [T, top_k]: the slots of the tokens with the best scores, in the order of their positions; -1 behind the
    last one where a query sees fewer than top_k.

    query_TND: float32 or bfloat16, rotated, and transformed where the keys are.
    weight_TN: fp32, of each head.
    request_T: int32, each query's row of page_table_BP; equal ones lie together.
    length_T: int32, how many tokens of its request each query sees, from the first on.
    ValueError when pages or lengths do not fit the cache; nothing is computed then.
    """
    T, N, D = query_TND.shape
    entry = IndexFormat.of_pages(D, key_pages)
    _check(query_TND.dtype in _DTYPES, f"query is {query_TND.dtype}, must be torch.float32 or torch.bfloat16")
    _check(
        weight_TN.shape == (T, N) and weight_TN.dtype == torch.float32,
        f"weight is {weight_TN.dtype} {tuple(weight_TN.shape)}, must be torch.float32 [{T}, {N}]",
    )
    _check(
        key_pages.dim() == 3 and key_pages.shape[2] == entry.width and key_pages.stride(2) == 1,
        f"key_pages is {tuple(key_pages.shape)}, must be [pages, page_size, {entry.width}] for {D} values",
    )
    _check(
        request_T.shape == length_T.shape == (T,),
        f"{T} queries, but request has shape {tuple(request_T.shape)} and length {tuple(length_T.shape)}",
    )
    num_slots = key_pages.shape[0] * key_pages.shape[1]
    _check(top_k >= 1, f"top_k={top_k}: must be at least 1")
    _check(num_slots < 2**31, f"key_pages has {num_slots} slots, must have fewer than 2**31")
    query = query_TND if query_TND.stride(2) == 1 else query_TND.contiguous()
    table, request, length = (x.to(torch.int32).contiguous() for x in (page_table_BP, request_T, length_T))
    slot_TK = torch.empty(T, top_k, dtype=torch.int32)
    threads = torch.get_num_threads()
    bad = native.load().index_topk(query, weight_TN.contiguous(), key_pages, table, request, length, slot_TK, threads)
    if bad >= 0:
        raise ValueError(
            f"query {bad}: sees {length[bad].item()} tokens of request {request[bad].item()}, but there are "
            f"{table.shape[0]} requests of up to {table.shape[1]} pages of {key_pages.shape[1]} tokens, and pages must "
            f"be below {key_pages.shape[0]}"
        )
    return slot_TK


def mla_chosen(
    q_nope_TNC: Tensor,
    q_rope_TNR: Tensor,
    kv_pages: Tensor,
    slot_TK: Tensor,
    length_T: Tensor,
    w_kv_b: Tensor,
    softmax_scale: float,
    rotation: Rotation,
    plans: dict[str, Any] | None = None,
) -> Tensor:
    """Attention of each query to the tokens in its first length_T slots, absorbed form: [T, N, value].

    kv_pages: contiguous, as of mla_decode. rotation: of q_rope_TNR. plans: of calls with the same lengths and shapes,
    for kernels that derive something from lengths.
    """
    context = PagedContext(kv_pages.view(-1, 1, kv_pages.shape[2]), slot_TK, length_T)  # pages of one token
    return attention.mla_decode(q_nope_TNC, q_rope_TNR, context, w_kv_b, softmax_scale, rotation)
