"""The indexer of DeepSeek-V3.2 and V4 on GPUs: scores, choice, and attention to what is chosen.

Scores of some rows at a time lie in a workspace of bounded size. Modules scores_NAME and choose_NAME have
    score(score_XS, query_XND, weight_XN, key_pages, page_table_BP, request_X, length_X)
    choose(slot_XK, score_XS, page_table_BP, request_X, length_X, page_size)
    is_installed() -> bool
    refusal(query_XND, key_pages), refusal(score_XS, top_k) -> None, or why it does not take these
Nothing is read on the host, so all of it may be recorded in a CUDA graph.

X rows, N heads, D values of a head, K chosen tokens, S tokens of the longest context.
"""

from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from eprt import env
from eprt.ops.attention import PagedContext
from eprt.ops.cuda import mla_triton
from eprt.ops.cuda.attention import absorbed, kernels
from eprt.ops.cuda.cache import insert_entries
from eprt.ops.elementwise import Rotation
from eprt.ops.index_format import IndexFormat

_MOST_SCORES = 1 << 27  # in the workspace: 512 MB
_MOST_ROWS = 1024  # attended at once: absorbed queries of 128 heads take 150 KB a row

# Name -> how to install it, the fastest first.
_KERNELS = {"eprt": "pip install 'eprt[cuda13]'", "triton": "pip install triton"}


def index_insert(key_pages: Tensor, kv_slot_T: Tensor, key_TD: Tensor) -> None:
    """As eprt.ops.indexer.index_insert. key_pages must be contiguous; slots are not checked."""
    entry = IndexFormat(key_TD.shape[-1], key_pages.dtype)
    insert_entries(key_pages, kv_slot_T, key_TD.contiguous(), 0, entry.width, entry.is_fp8)


def index_topk(
    query_TND: Tensor,
    weight_TN: Tensor,
    key_pages: Tensor,
    page_table_BP: Tensor,
    request_T: Tensor,
    length_T: Tensor,
    top_k: int,
    most_scores: int = _MOST_SCORES,
) -> Tensor:
    """As eprt.ops.indexer.index_topk. Pages and lengths are not checked."""
    X = query_TND.shape[0]
    slot_XK = torch.empty(X, top_k, dtype=torch.int32, device=query_TND.device)
    page_table_BP, request_T, length_T = (x.to(torch.int32) for x in (page_table_BP, request_T, length_T))
    most_seen = page_table_BP.shape[1] * key_pages.shape[1]
    rows = max(1, most_scores // max(1, most_seen))
    for first in range(0, X, rows):
        piece = slice(first, first + rows)
        query, weight = query_TND[piece].contiguous(), weight_TN[piece].contiguous()
        where = page_table_BP, request_T[piece], length_T[piece]
        _choose_rows(slot_XK[piece], query, weight, key_pages, *where)
    return slot_XK


def _choose_rows(
    slot_XK: Tensor,
    query_XND: Tensor,
    weight_XN: Tensor,
    key_pages: Tensor,
    page_table_BP: Tensor,
    request_X: Tensor,
    length_X: Tensor,
) -> None:
    page_size, top_k, most_seen = key_pages.shape[1], slot_XK.shape[1], page_table_BP.shape[1] * key_pages.shape[1]
    stride = -(-most_seen // 4) * 4  # rows begin at multiples of 16 bytes
    score_XS = torch.empty(len(query_XND), stride, dtype=torch.float32, device=query_XND.device)[:, :most_seen]
    where = page_table_BP, request_X, length_X
    _first("scores", query_XND, key_pages).score(score_XS, query_XND, weight_XN, key_pages, *where)
    _first("choose", score_XS, top_k).choose(slot_XK, score_XS, *where, page_size)


def _first(work: str, *inputs: Any) -> ModuleType:
    """Who does it: the first that EPRT_GPU_INDEXER asks for and that takes these inputs; Triton takes them all."""
    wanted = env.get("EPRT_GPU_INDEXER")
    for name, install in _KERNELS.items():
        if wanted in ("auto", name):
            module = import_module(f"eprt.ops.cuda.{work}_{name}")
            if module.is_installed():
                if module.refusal(*inputs) is None:
                    return module
            elif wanted == name:
                raise ImportError(f"EPRT_GPU_INDEXER={wanted}: it is not installed; {install}, or use auto")
    return import_module(f"eprt.ops.cuda.{work}_triton")


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
    """As eprt.ops.indexer.mla_chosen, some rows at a time."""
    kv_pages, parts = kv_pages.view(-1, 1, kv_pages.shape[2]), []  # pages of one token
    plans = {} if plans is None else plans
    for first in range(0, max(1, len(slot_TK)), _MOST_ROWS):
        rows = slice(first, first + _MOST_ROWS)
        context = PagedContext(kv_pages, slot_TK[rows], length_T[rows])
        turned = Rotation(rotation.cos_sin_PR, rotation.position_T[rows], rotation.interleaved)
        queries, plan = (q_nope_TNC[rows], q_rope_TNR[rows]), plans.setdefault(f"chosen tokens of rows {first}", {})
        module = _attender(*queries, context, w_kv_b.shape[1])
        parts.append(absorbed(module, *queries, context, w_kv_b, softmax_scale, turned, plan))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _attender(q_nope_TNC: Tensor, q_rope_TNR: Tensor, context: PagedContext, latent_size: int) -> ModuleType:
    """The first kernel of those that EPRT_GPU_ATTENTION names that takes pages of one token; Triton takes them all."""
    q_latent_0NL = q_nope_TNC.new_empty(0, q_nope_TNC.shape[1], latent_size)
    for module in kernels(env.get("EPRT_GPU_ATTENTION")):
        if module.refusal(q_latent_0NL, q_rope_TNR, context) is None:
            return module
    return mla_triton
