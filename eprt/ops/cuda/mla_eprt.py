"""Absorbed attention by eprt's own kernels for Hopper: csrc/cuda/mla_decode.cu for bfloat16 caches, mla_dense_fp8.cu
for fp8 caches, launched by eprt/gpu/mla_decode.py and mla_decode_fp8.py.

A step's schedule is made on the GPU from the lengths, so it may be recorded in a CUDA graph; the layers of a step share
it. Knows what the kernels take, not how they compute.
"""

import functools
import importlib.util
from typing import Any

import torch
from torch import Tensor

from eprt import env
from eprt.gpu import mla_decode, mla_decode_fp8
from eprt.gpu.mla_decode import LATENT, PAGE_MULTIPLE, ROPE
from eprt.ops.attention import PagedContext
from eprt.ops.cuda.queries import prepare

JOINS_QUERIES = True


def is_installed() -> bool:
    return importlib.util.find_spec("cuda") is not None and importlib.util.find_spec("cuda.bindings") is not None


def refusal(q_latent: Tensor, q_rope: Tensor, context: PagedContext) -> str | None:
    """Why the kernel cannot compute this; None when it can."""
    kv_pages = context.kv_pages
    if q_latent.dtype != torch.bfloat16 or kv_pages.dtype not in (torch.bfloat16, torch.uint8):
        return f"it takes a bfloat16 or fp8 cache and bfloat16 queries, not {kv_pages.dtype} and {q_latent.dtype}"
    if (kv_pages.shape[1] % PAGE_MULTIPLE and kv_pages.shape[1] != 1) or not kv_pages.is_contiguous():
        return f"it takes contiguous pages of 1 or a multiple of {PAGE_MULTIPLE} tokens, not {tuple(kv_pages.shape)}"
    if (q_latent.shape[2], q_rope.shape[2]) != (LATENT, ROPE):
        return f"it takes entries of {LATENT} + {ROPE} values, not {q_latent.shape[2]} + {q_rope.shape[2]}"
    if q_latent.is_cuda:
        return _refusal_of_device(q_latent.device.index, kv_pages.dtype == torch.uint8)
    return None


@functools.cache
def _refusal_of_device(device: int, fp8: bool) -> str | None:
    if torch.cuda.get_device_capability(device) != (9, 0):
        return "it runs on Hopper only"
    try:
        mla_decode.load(device)
        if fp8:
            mla_decode_fp8.load(device, _query_terms())
    except ImportError as error:
        return str(error)
    return None


def attend(
    q_latent_TNL: Tensor,
    q_rope_TNR: Tensor,
    context: PagedContext,
    softmax_scale: float,
    plans: dict[str, Any] | None = None,
) -> Tensor:
    """As mla_triton.attend, for what refusal() lets pass. plans: of calls with the same lengths and shapes."""
    length, start = context.seq_len_B, context.query_start_B1

    def make_schedule(q_TND: Tensor) -> mla_decode.MlaSchedule:
        whole = env.get("EPRT_GPU_ATTENTION_CUTS") == "none"
        return mla_decode.make_schedule(length, start, *q_TND.shape[1::-1], whole)

    q_TND, schedule = prepare(q_latent_TNL, q_rope_TNR, plans, "eprt", make_schedule)
    where = context.kv_pages, context.page_table_BP, length, start
    if context.kv_pages.dtype == torch.uint8:
        return mla_decode_fp8.mla_decode_fp8(q_TND, *where, softmax_scale, schedule, _query_terms())
    return mla_decode.mla_decode(q_TND, *where, softmax_scale, schedule)


def _query_terms() -> int:
    return {"fp8": 1, "2xfp8": 2}[env.get("EPRT_GPU_ATTENTION_QUERY")]
