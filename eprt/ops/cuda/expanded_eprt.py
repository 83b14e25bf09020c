"""Expanded attention of prompts by eprt's own kernel for Hopper (csrc/cuda/prompt_attention.cu, launched by
eprt/gpu/prompt_attention.py). Knows what the kernel takes, not how it computes.
"""

import functools

import torch
from torch import Tensor

from eprt.gpu import prompt_attention
from eprt.gpu.prompt_attention import NOPE, ROPE, VALUE
from eprt.ops.attention import PagedContext


def refusal(q_TNC: Tensor, r_TNR: Tensor, kv_SNE: Tensor) -> str | None:
    """Why the kernel cannot compute this; None when it can."""
    if any(x.dtype != torch.bfloat16 for x in (q_TNC, r_TNR, kv_SNE)):
        return "it takes bfloat16"
    sizes = q_TNC.shape[2], r_TNR.shape[2], kv_SNE.shape[2] - q_TNC.shape[2]
    if sizes != (NOPE, ROPE, VALUE):
        return f"it takes heads of {NOPE} + {ROPE} and {VALUE} values, not {sizes[0]} + {sizes[1]} and {sizes[2]}"
    if any(x.stride(0) % 64 or x.stride(1) % 64 or x.stride(2) != 1 for x in (q_TNC, r_TNR)):
        return "it takes queries whose heads are multiples of 64 values apart"
    return _refusal_of_device(q_TNC.device.index) if q_TNC.is_cuda else "it runs on GPUs"


@functools.cache
def _refusal_of_device(device: int) -> str | None:
    if torch.cuda.get_device_capability(device) != (9, 0):
        return "it runs on Hopper only"
    try:
        prompt_attention.load(device)
    except ImportError as error:
        return str(error)
    return None


def attend(
    out: Tensor, q: Tensor, r: Tensor, kv: Tensor, rope_SR: Tensor, context: PagedContext, softmax_scale: float
) -> None:
    """As expanded_triton.attend, for what refusal() lets pass."""
    assert context.query_start_B1 is not None
    prompt_attention.prompt_attention(q, r, kv, rope_SR, context.seq_len_B, context.query_start_B1, softmax_scale, out)
