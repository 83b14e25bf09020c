"""Decoding attention by FlashMLA, where a package that has its kernels for Hopper is installed.

Such are PyPI's sgl-flash-mla, and github.com/deepseek-ai/FlashMLA at a commit before they were removed. Both are
imported as flash_mla; the first has these kernels behind use_legacy=True. Their schedule is made on the GPU from the
lengths, so it may be recorded in a CUDA graph; it takes 20 us, so the layers of a step share it.
"""

import functools
import importlib.util
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from eprt.ops.attention import PagedContext
from eprt.ops.cuda.queries import prepare

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

    def empty_plan(_: Tensor) -> Any:
        return get_mla_metadata()[0]  # the first call fills it

    q_TND, plan = prepare(q_latent_TNL, q_rope_TNR, plans, "flashmla", empty_plan)
    cache = context.kv_pages.unsqueeze(2)
    where = cache, context.page_table_BP, context.seq_len_B
    options = {"softmax_scale": softmax_scale, **_legacy(flash_mla_with_kvcache)}
    out_T1NL, _ = flash_mla_with_kvcache(q_TND.unsqueeze(1), *where, LATENT, plan, **options)
    return out_T1NL.squeeze(1)


@functools.cache
def _legacy(function: Callable[..., Any]) -> dict[str, bool]:
    """The option that asks for the kernels for Hopper, if there is such an option."""
    return {"use_legacy": True} if "use_legacy" in inspect.signature(function).parameters else {}
