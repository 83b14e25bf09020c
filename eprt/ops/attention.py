"""Multi-head latent attention over a paged latent cache, and the cache itself.

kv_pages: [num_pages, page_size, D] float32 or bfloat16, D = kv_lora_rank + rope: the normalised latent, then the
rotated shared key.
page_table_BP: int32 [B, P], the pages of each request in order (entries past its length are ignored).
seq_len_B: int32 [B], context length of each request including its new tokens, whose cache entries are already inserted.
w_kv_b: [heads * (nope + value), kv_lora_rank], rows per head [nope | value], in q's dtype or float32.
Softmax and accumulation are fp32. A row's result does not depend on how the prompt was cut into chunks or on the batch.
"""

from torch import Tensor

from eprt.ops import reference


def cache_insert(kv_pages: Tensor, kv_slot_T: Tensor, kv_TD: Tensor) -> None:
    """Writes entry t at slot kv_slot_T[t] = page * page_size + offset (int32 or int64; all different)."""
    reference.cache_insert(kv_pages, kv_slot_T, kv_TD)


def mla_decode(
    q_nope_BNC: Tensor,
    q_rope_BNR: Tensor,
    kv_pages: Tensor,
    page_table_BP: Tensor,
    seq_len_B: Tensor,
    w_kv_b: Tensor,
    softmax_scale: float,
) -> Tensor:
    """One new token per request, absorbed form: [B, N, value]. Split-KV in two phases; heads folded into the GEMM."""
    return reference.mla_decode(q_nope_BNC, q_rope_BNR, kv_pages, page_table_BP, seq_len_B, w_kv_b, softmax_scale)


def mla_extend(
    q_nope_TNC: Tensor,
    q_rope_TNR: Tensor,
    kv_pages: Tensor,
    page_table_BP: Tensor,
    seq_len_B: Tensor,
    query_start_B1: Tensor,
    w_kv_b: Tensor,
    softmax_scale: float,
) -> Tensor:
    """The last query_start_B1[b+1] - query_start_B1[b] tokens of each request (int32 [B+1], packed): [T, N, value].

    The cached prefix is a rectangle, the chunk a causal triangle; the score matrix is never materialised.
    """
    return reference.mla_extend(
        q_nope_TNC, q_rope_TNR, kv_pages, page_table_BP, seq_len_B, query_start_B1, w_kv_b, softmax_scale
    )
