"""Multi-head latent attention over the paged cache: which kernel computes it, and what surrounds every kernel.

Queries are taken into the latent space (absorbed), attended there, and the result is taken out of it: the same for
decodes and for prompts. A kernel is a function of the signature of mla_triton.attend.
"""

from collections.abc import Callable
from importlib import import_module

import torch
from torch import Tensor

# Name -> "module:function", the first is used.
_KERNELS = {"triton": "eprt.ops.cuda.mla_triton:attend"}


def kernel(name: str = "triton") -> Callable[..., Tensor]:
    module, function = _KERNELS[name].split(":")
    return getattr(import_module(module), function)


def mla_decode(
    q_nope_BNC: Tensor,
    q_rope_BNR: Tensor,
    kv_pages: Tensor,
    page_table_BP: Tensor,
    seq_len_B: Tensor,
    w_kv_b: Tensor,
    softmax_scale: float,
) -> Tensor:
    return _mla(q_nope_BNC, q_rope_BNR, kv_pages, page_table_BP, seq_len_B, None, w_kv_b, softmax_scale)


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
    return _mla(q_nope_TNC, q_rope_TNR, kv_pages, page_table_BP, seq_len_B, query_start_B1, w_kv_b, softmax_scale)


def _mla(
    q_nope_TNC: Tensor,
    q_rope_TNR: Tensor,
    kv_pages: Tensor,
    page_table_BP: Tensor,
    seq_len_B: Tensor,
    query_start_B1: Tensor | None,
    w_kv_b: Tensor,
    softmax_scale: float,
) -> Tensor:
    """query_start_B1: None for one token per request."""
    heads, nope = q_nope_TNC.shape[1:]
    w_NVL = w_kv_b.view(heads, -1, w_kv_b.shape[1])
    q_latent_NTL = torch.bmm(q_nope_TNC.transpose(0, 1), w_NVL[:, :nope])
    latent_NTL = kernel()(
        q_latent_NTL.transpose(0, 1), q_rope_TNR, kv_pages, page_table_BP, seq_len_B, query_start_B1, softmax_scale
    ).transpose(0, 1)
    return torch.bmm(latent_NTL, w_NVL[:, nope:].transpose(1, 2)).transpose(0, 1)
