"""Decoding attention by FlashMLA (github.com/deepseek-ai/FlashMLA), where it is installed: on Hopper more than twice as
fast as the Triton kernel. Its schedule is made on the GPU from the lengths, so it may be recorded in a CUDA graph; it
takes 20 us, so the layers of a step share it.
"""

import importlib.util
from typing import Any

import torch
from torch import Tensor

from eprt.ops.attention import PagedContext

JOINS_QUERIES = True
PAGE_SIZE, LATENT, ROPE = 64, 512, 64


def is_installed() -> bool:
    return importlib.util.find_spec("flash_mla") is not None


def refusal(q_latent: Tensor, q_rope: Tensor, context: PagedContext) -> str | None:
    """Why FlashMLA cannot compute this; None when it can."""
    kv_pages = context.kv_pages
    if context.query_start_B1 is not None:
        return "it takes decodes, not prompts"
    if q_latent.dtype != torch.bfloat16 or kv_pages.dtype != torch.bfloat16:
        return f"it takes a bfloat16 cache and queries, not {kv_pages.dtype} and {q_latent.dtype}"
    if kv_pages.shape[1] != PAGE_SIZE:
        return f"it takes pages of {PAGE_SIZE} tokens (--page-size {PAGE_SIZE}), not {kv_pages.shape[1]}"
    if (q_latent.shape[2], q_rope.shape[2]) != (LATENT, ROPE):
        return f"it takes entries of {LATENT} + {ROPE} values, not {q_latent.shape[2]} + {q_rope.shape[2]}"
    if q_latent.is_cuda and torch.cuda.get_device_capability(q_latent.device) != (9, 0):
        return "it runs on Hopper only"
    return None


def attend(
    q_latent_TNL: Tensor,
    q_rope_TNR: Tensor,
    context: PagedContext,
    softmax_scale: float,
    plans: dict[str, Any] | None = None,
) -> Tensor:
    """As mla_triton.attend, for what refusal() lets pass. plans: of calls with the same lengths and shapes."""
    from flash_mla import flash_mla_with_kvcache, get_mla_metadata

    plans = {} if plans is None else plans
    if "flashmla" not in plans:
        plans["flashmla"], _ = get_mla_metadata()  # empty; the first call fills it
    q_T1ND, cache = _joined(q_latent_TNL, q_rope_TNR).unsqueeze(1), context.kv_pages.unsqueeze(2)
    where = cache, context.page_table_BP, context.seq_len_B
    out_T1NL, _ = flash_mla_with_kvcache(q_T1ND, *where, LATENT, plans["flashmla"], softmax_scale=softmax_scale)
    return out_T1NL.squeeze(1)


def _joined(q_latent_TNL: Tensor, q_rope_TNR: Tensor) -> Tensor:
    """[T, N, L + R]: the memory they lie in, where one lies behind the other; else a copy."""
    T, N, L = q_latent_TNL.shape
    behind = q_rope_TNR.data_ptr() == q_latent_TNL.data_ptr() + L * q_latent_TNL.element_size()
    if behind and q_rope_TNR.stride() == q_latent_TNL.stride():
        return q_latent_TNL.as_strided((T, N, L + q_rope_TNR.shape[2]), q_latent_TNL.stride())
    return torch.cat((q_latent_TNL, q_rope_TNR), dim=-1)
