"""RMSNorm of query latents beside norm, rotation and insertion of the same tokens' cache entries, in one kernel."""

import triton
import triton.language as tl
from torch import Tensor

from eprt.ops.cuda.cache import entry_of, latent_insert_kernel
from eprt.ops.cuda.norm import rms_norm_kernel, row_warps
from eprt.ops.elementwise import Rotation


@triton.jit
def _norm_insert(
    out,
    q,
    q_weight,
    q_stride,
    q_size,
    q_eps,
    pages,
    slot_T,
    kv,
    weight,
    cos_sin,
    position_T,
    token_stride,
    eps,
    latent_size,
    half,
    entry_size,
    FP8: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    LATENT: tl.constexpr,
    HALF: tl.constexpr,
    QUERY: tl.constexpr,
):
    if tl.program_id(1) == 0:
        latent_insert_kernel(
            pages,
            slot_T,
            kv,
            weight,
            cos_sin,
            position_T,
            token_stride,
            eps,
            latent_size,
            half,
            entry_size,
            FP8,
            INTERLEAVED,
            LATENT,
            HALF,
        )
    else:
        rms_norm_kernel(out, out, q, q, q_weight, q_stride, q_stride, q_size, q_eps, False, QUERY)


def norm_insert(
    q_TA: Tensor,
    q_norm_weight_A: Tensor,
    q_eps: float,
    kv_pages: Tensor,
    kv_slot_T: Tensor,
    kv_TD: Tensor,
    norm_weight_L: Tensor,
    eps: float,
    rotation: Rotation,
) -> Tensor:
    """As eprt.ops.attention.norm_insert. kv_pages must be contiguous; slots are not checked."""
    (tokens, q_size), latent_size = q_TA.shape, norm_weight_L.shape[0]
    entry, half = entry_of(kv_pages, kv_TD.shape[1], kv_TD.shape[1] - latent_size), (kv_TD.shape[1] - latent_size) // 2
    out_TA, query = q_TA.new_empty(tokens, q_size), triton.next_power_of_2(q_size)
    if tokens:
        _norm_insert[(tokens, 2)](
            out_TA,
            q_TA,
            q_norm_weight_A,
            q_TA.stride(0),
            q_size,
            q_eps,
            kv_pages,
            kv_slot_T,
            kv_TD,
            norm_weight_L,
            rotation.cos_sin_PR,
            rotation.position_T,
            kv_TD.stride(0),
            eps,
            latent_size,
            half,
            entry.width,
            FP8=entry.is_fp8,
            INTERLEAVED=rotation.interleaved,
            LATENT=triton.next_power_of_2(latent_size),
            HALF=triton.next_power_of_2(half),
            QUERY=query,
            num_warps=max(4, row_warps(query)),
        )
    return out_TA
