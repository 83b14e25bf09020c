"""The indexer's scores by eprt's own kernel for Hopper: csrc/cuda/index_scores.cu, by eprt/gpu/index_scores.py.

It takes an fp8 cache of keys, and queries in bfloat16, which become e4m3 here: each head of a row is divided by the
smallest power of 2 that lets e4m3 hold it, and its weight multiplied by that.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from eprt.gpu import index_scores
from eprt.ops.cuda.choose_eprt import is_installed

__all__ = ["is_installed", "refusal", "score"]


def refusal(query_XND: Tensor, key_pages: Tensor) -> str | None:
    """Why the kernel cannot score these; None when it can."""
    if key_pages.dtype != torch.uint8 or query_XND.dtype != torch.bfloat16:
        return f"it takes an fp8 cache and bfloat16 queries, not {key_pages.dtype} and {query_XND.dtype}"
    if query_XND.shape[1:] != (index_scores.HEADS, index_scores.SIZE):
        return f"it takes {index_scores.HEADS} heads of {index_scores.SIZE} values, not {tuple(query_XND.shape[1:])}"
    if key_pages.shape[2] != index_scores.KEY_BYTES:
        return f"it takes keys of {index_scores.KEY_BYTES} bytes, not {key_pages.shape[2]}"
    if key_pages.shape[1] % index_scores.PAGE_MULTIPLE or not index_scores.reads(key_pages):
        return f"it takes pages of a multiple of {index_scores.PAGE_MULTIPLE} keys side by side, not {_told(key_pages)}"
    return _refusal_of_device(query_XND.device.index) if query_XND.is_cuda else "it runs on GPUs"


def _told(pages: Tensor) -> str:
    return f"{tuple(pages.shape)} at distances {pages.stride()}"


@functools.cache
def _refusal_of_device(device: int) -> str | None:
    if torch.cuda.get_device_capability(device) != (9, 0):
        return "it runs on Hopper only"
    try:
        index_scores.load(device)
    except ImportError as error:
        return str(error)
    return None


@triton.jit
def _quantize(out, out_weight, query, weight, HEADS: tl.constexpr, SIZE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    head, i = tl.arange(0, HEADS), tl.arange(0, SIZE)
    at = row * HEADS * SIZE + head[:, None] * SIZE + i[None, :]
    value = tl.load(query + at).to(tl.float32)
    least = tl.max(tl.abs(value), 1) / 448.0
    scale = ((tl.maximum(least, 1e-30).to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
    tl.store(out.to(tl.pointer_type(tl.float8e4nv)) + at, (value / scale[:, None]).to(tl.float8e4nv))
    tl.store(out_weight + row * HEADS + head, tl.load(weight + row * HEADS + head) * scale)


def quantize(query_XND: Tensor, weight_XN: Tensor) -> tuple[Tensor, Tensor]:
    """(e4m3 as uint8, weights that have the scales)."""
    X, N, D = query_XND.shape
    out, weight = torch.empty(X, N, D, dtype=torch.uint8, device=query_XND.device), torch.empty_like(weight_XN)
    _quantize[(X,)](out, weight, query_XND, weight_XN, HEADS=N, SIZE=D)
    return out, weight


def score(score_XS: Tensor, query_XND: Tensor, weight_XN: Tensor, key_pages: Tensor, *where: Tensor) -> None:
    """As scores_triton.score, for what refusal() lets pass. where: page table, request and length of each row."""
    index_scores.index_scores(score_XS, *quantize(query_XND, weight_XN), key_pages, *where)
