"""Multi-head latent attention over the paged cache: which kernel computes it, and what surrounds every kernel.

Decodes and short extensions use the absorbed form: queries are projected into the latent space, attention happens
there, and the result is projected back. Prompts use the expanded form (mla_expanded.py). Kernels of the absorbed form
are modules of this folder with
    attend(q_latent, q_rope, context, softmax_scale, plans=...) -> latent outputs. plans: a dict in which the kernel
        keeps what it derived from the lengths for the other layers of the same step
    JOINS_QUERIES: whether q_rope should lie behind q_latent in memory, head by head
    is_installed() -> bool
    refusal(q_latent, q_rope, context) -> None, or why the kernel cannot compute these
What a context may ask of a kernel is in the context; a kernel that lacks it refuses.
"""

import functools
import logging
from dataclasses import replace
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from eprt import env
from eprt.ops.attention import PagedContext
from eprt.ops.cuda import mla_expanded
from eprt.ops.cuda.rope import rotate
from eprt.ops.elementwise import Rotation

_log = logging.getLogger(__name__)

# Name -> (module, how to install it), the fastest first. The first that is installed and does not refuse is used.
_KERNELS = {
    "eprt": ("eprt.ops.cuda.mla_eprt", "pip install 'eprt[cuda13]'"),
    "flashmla": ("eprt.ops.cuda.mla_flashmla", "pip install --no-deps sgl-flash-mla"),
    "triton": ("eprt.ops.cuda.mla_triton", "pip install triton"),
}


def installed() -> list[str]:
    """Names of the kernels that this machine has, the preferred one first."""
    return [name for name, (module, _) in _KERNELS.items() if import_module(module).is_installed()]


@functools.cache
def kernels(wanted: str) -> tuple[ModuleType, ...]:
    """The kernels to ask, in order. wanted: EPRT_GPU_ATTENTION. ImportError when it names a kernel that is missing."""
    if wanted == "auto":
        return tuple(import_module(_KERNELS[name][0]) for name in installed())
    module, install = import_module(_KERNELS[wanted][0]), _KERNELS[wanted][1]
    if not module.is_installed():
        raise ImportError(f"EPRT_GPU_ATTENTION={wanted}: it is not installed; {install}, or use auto")
    return (module,)


def kernel(q_latent: Tensor, q_rope: Tensor, context: PagedContext) -> ModuleType:
    """The first kernel that takes these shapes and dtypes; for prompts, whatever EPRT_GPU_ATTENTION names, Triton takes
    what that kernel does not. ValueError when EPRT_GPU_ATTENTION names one that does not take these decodes."""
    wanted, reason = env.get("EPRT_GPU_ATTENTION"), None
    for module in kernels(wanted):
        before, reason = reason, module.refusal(q_latent, q_rope, context)
        if reason is None:
            if context.query_start_B1 is None:
                _log_choice(wanted, module, before)
            return module
    if context.query_start_B1 is not None:
        return import_module(_KERNELS["triton"][0])
    raise ValueError(f"EPRT_GPU_ATTENTION={wanted}: {reason}; use auto")


@functools.cache
def _log_choice(wanted: str, module: ModuleType, refused: str | None) -> None:
    """Logs once which kernel attends decodes, and why it is not the preferred one.

    refused: the preferred kernel's refusal; None if it is not installed.
    """
    (name,) = (name for name, (path, _) in _KERNELS.items() if path == module.__name__)
    first, (_, install) = next(iter(_KERNELS.items()))
    if name != first and wanted == "auto":
        refused = refused or f"it is not installed ({install})"
        _log.info("decodes are attended by %s; not by %s: %s", name, first, refused)
    else:
        _log.info("decodes are attended by %s", name)


def mla_extend(
    q_nope_TNC: Tensor,
    q_rope_TNR: Tensor,
    context: PagedContext,
    w_kv_b: Tensor,
    softmax_scale: float,
    plans: dict[str, Any] | None = None,
) -> Tensor:
    """The expanded form for bfloat16 where it is faster; otherwise the absorbed form, as for decodes.

    The expanded form copies latents out of their pages once. The absorbed one reads them again for every tile of
    queries, so pages that are far are copied before.
    """
    sizes = q_nope_TNC.shape[0], context.seq_len_B.shape[0], context.num_tokens
    if q_nope_TNC.dtype == torch.bfloat16 and mla_expanded.pays(*sizes):
        return mla_expanded.attend_prompts(q_nope_TNC, q_rope_TNR, context, w_kv_b, softmax_scale)
    if context.is_far:
        context = _brought_near(context)
    return mla_decode(q_nope_TNC, q_rope_TNR, context, w_kv_b, softmax_scale, plans=plans)


def _brought_near(context: PagedContext) -> PagedContext:
    """The same entries in pages of this GPU's memory, request after request."""
    table_BP = context.page_table_BP
    pages = context.kv_pages.index_select(0, table_BP.reshape(-1))
    own_BP = torch.arange(table_BP.numel(), dtype=torch.int32, device=table_BP.device).view(table_BP.shape)
    return replace(context, kv_pages=pages, page_table_BP=own_BP, is_far=False)


def mla_decode(
    q_nope_TNC: Tensor,
    q_rope_TNR: Tensor,
    context: PagedContext,
    w_kv_b: Tensor,
    softmax_scale: float,
    rotation: Rotation | None = None,
    plans: dict[str, Any] | None = None,
) -> Tensor:
    """The absorbed form, [T, N, value], contiguous: also of several tokens per request."""
    return absorbed(None, q_nope_TNC, q_rope_TNR, context, w_kv_b, softmax_scale, rotation, plans)


def absorbed(
    module: ModuleType | None,
    q_nope_TNC: Tensor,
    q_rope_TNR: Tensor,
    context: PagedContext,
    w_kv_b: Tensor,
    softmax_scale: float,
    rotation: Rotation | None = None,
    plans: dict[str, Any] | None = None,
) -> Tensor:
    """mla_decode by a given kernel; None: the first that takes these shapes."""
    tokens, heads, nope = q_nope_TNC.shape
    w_NVL = w_kv_b.view(heads, -1, w_kv_b.shape[1])
    sizes = w_kv_b.shape[1], q_rope_TNR.shape[2]
    q_latent_TNL, q_tail_TNR = q_nope_TNC.new_empty(tokens, heads, sum(sizes)).split(sizes, dim=-1)
    torch.bmm(q_nope_TNC.transpose(0, 1), w_NVL[:, :nope], out=q_latent_TNL.transpose(0, 1))
    module = module or kernel(q_latent_TNL, q_rope_TNR, context)
    if rotation is not None:
        q_rope_TNR = rotate(q_rope_TNR, rotation, q_tail_TNR)
    elif module.JOINS_QUERIES:
        q_rope_TNR = q_tail_TNR.copy_(q_rope_TNR)
    latent_TNL = module.attend(q_latent_TNL, q_rope_TNR, context, softmax_scale, plans=plans)
    out_TNV = q_nope_TNC.new_empty(tokens, heads, w_NVL.shape[1] - nope)
    torch.bmm(latent_TNL.transpose(0, 1), w_NVL[:, nope:].transpose(1, 2), out=out_TNV.transpose(0, 1))
    return out_TNV
