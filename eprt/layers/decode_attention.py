"""Attention of a step of decodes as one operator (ops.attend_decodes), with the norms before and behind it.

Fits a layer on the CPU whose heads and cache are its rank's own, and a step in which every request has one token. Other
steps call the operators one by one, and give the same bits. Knows nothing of experts.
"""

import torch
from torch import Tensor

from eprt import ops
from eprt.layers.batch import ForwardBatch
from eprt.layers.layer_cache import LayerCache
from eprt.layers.linear import Linear
from eprt.layers.norm import RMSNorm
from eprt.ops.decode_layer import DecodeAttention, DecodeContext, NormedProjection

_TYPES = (torch.float32, torch.bfloat16)


def normed_projection(norm: RMSNorm, linear: Linear) -> NormedProjection:
    return NormedProjection(norm.weight_H, norm.eps, linear.weight, linear.bias_N)


class AttendDecodes:
    """One layer's."""

    def __init__(self, weights: DecodeAttention):
        self._arguments = weights.arguments

    def __call__(self, x_TH: Tensor, batch: ForwardBatch, cache: LayerCache) -> tuple[Tensor, Tensor] | None:
        """(the MLP's normalised input, the residual stream), or None where the operators must be called one by one."""
        b, T = batch, batch.num_tokens
        if not 0 < T == b.num_decode or b.meet is not None or cache.latents.dtype not in _TYPES:
            return None
        context = DecodeContext(cache.latents, b.kv_slot_T, b.position_T, b.page_table_BP, b.seq_len_B)
        return ops.attend_decodes(x_TH, self._arguments, context)
