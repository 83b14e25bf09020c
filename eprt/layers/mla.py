"""Multi-head latent attention over the paged latent cache (DeepSeek-V2, arXiv:2405.04434).

N heads, C latent (kv_lora_rank), R rotary dimensions, D = C + R cached values per token.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from eprt import ops
from eprt.config import ModelConfig
from eprt.layers.batch import Extension, ForwardBatch
from eprt.layers.decode_attention import AttendDecodes, normed_projection
from eprt.layers.layer_cache import LayerCache
from eprt.layers.linear import JoinedLinear, Linear
from eprt.layers.norm import RMSNorm
from eprt.layers.rope import softmax_scale
from eprt.ops.attention import PagedContext
from eprt.ops.decode_layer import DecodeAttention
from eprt.ops.elementwise import Rotation

# The norms of both latents use their class's default, not the model's rms_norm_eps, in DeepSeek's code and everywhere.
LATENT_NORM_EPS = 1e-6


@dataclass(frozen=True)
class MLAWeights:
    qkv_a: JoinedLinear  # q_a_proj and kv_a_proj; or q_proj and kv_a_proj, without q_a_norm and q_b
    q_a_norm: RMSNorm | None
    q_b: Linear | None
    kv_a_norm: RMSNorm
    w_kv_b: Tensor  # [N * (nope + value), C], never quantised
    o: Linear


class MLA:
    def __init__(self, config: ModelConfig, weights: MLAWeights, cos_sin_PR: Tensor):
        self.config, self.weights, self.cos_sin_PR = config, weights, cos_sin_PR
        self.softmax_scale = softmax_scale(config.rope, config.qk_head_dim)

    def __call__(
        self, x_TH: Tensor, norm: RMSNorm, batch: ForwardBatch, cache: LayerCache, plans: dict[str, Any] | None = None
    ) -> Tensor:
        """Of norm(x). Writes this batch's cache entries, then attends. plans: see ops.mla_decode."""
        q_TA, kv_TD = self.weights.qkv_a.of_norm(x_TH, norm)
        q_nope_TNC, q_rope_TNR = self._queries(q_TA)
        kv_norm, rotation = self.weights.kv_a_norm, self._rotation(batch.position_T)
        ops.latent_insert(cache.latents, batch.kv_slot_T, kv_TD, kv_norm.weight_H, kv_norm.eps, rotation)
        if batch.meet is not None:
            batch.meet()
        return self.weights.o(self._attend(q_nope_TNC, q_rope_TNR, batch, cache.latents, plans).flatten(1))

    def between(self, norm: RMSNorm, next_norm: RMSNorm) -> AttendDecodes | None:
        """One operator for decodes, from the norm before to the norm behind; None where there is none."""
        c, w = self.config, self.weights
        if w.w_kv_b.is_cuda or len(w.qkv_a.parts) > 1:
            return None
        q_b = None
        if w.q_a_norm is not None:
            assert w.q_b is not None
            q_b = normed_projection(w.q_a_norm, w.q_b)
        kv = w.kv_a_norm.weight_H, w.kv_a_norm.eps, self.cos_sin_PR, c.rope_interleave
        heads = w.w_kv_b, c.num_attention_heads, c.qk_nope_head_dim, self.softmax_scale
        behind = w.o.weight, w.o.bias_N, next_norm.weight_H, next_norm.eps
        return AttendDecodes(DecodeAttention(normed_projection(norm, w.qkv_a.parts[0]), q_b, *kv, *heads, *behind))

    def _queries(self, q_TA: Tensor) -> tuple[Tensor, Tensor]:
        """Not rotated yet."""
        w = self.weights
        if w.q_a_norm is not None:
            assert w.q_b is not None
            q_TA = w.q_b.of_norm(q_TA, w.q_a_norm)
        return self._parts_of_heads(q_TA)

    def _parts_of_heads(self, q_TA: Tensor) -> tuple[Tensor, Tensor]:
        c = self.config
        q = q_TA.view(-1, c.num_attention_heads, c.qk_head_dim)
        q_nope, q_rope = q.split([c.qk_nope_head_dim, c.qk_rope_head_dim], dim=-1)
        return q_nope, q_rope

    def _rotation(self, position_T: Tensor) -> Rotation:
        return Rotation(self.cos_sin_PR, position_T, self.config.rope_interleave)

    def _attend(
        self, q_nope: Tensor, q_rope: Tensor, batch: ForwardBatch, kv_pages: Tensor, plans: dict[str, Any] | None
    ) -> Tensor:
        """[T, N, value]: the decode rows absorbed, the rows of prompts by extension, both in one step."""
        d, w_kv_b, scale = batch.num_decode, self.weights.w_kv_b, self.softmax_scale
        page_table, seq_len = batch.page_table_BP, batch.seq_len_B
        parts = []
        if d:
            context, rotation = (
                PagedContext(kv_pages, page_table[:d], seq_len[:d]),
                self._rotation(batch.position_T[:d]),
            )
            parts.append(ops.mla_decode(q_nope[:d], q_rope[:d], context, w_kv_b, scale, rotation, plans))
        for some in batch.extensions():
            parts.append(self._extend(q_nope, q_rope, batch, some, kv_pages, plans))
        if not parts:
            return q_nope.new_empty(0, q_nope.shape[1], self.config.v_head_dim)
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _extend(
        self,
        q_nope: Tensor,
        q_rope: Tensor,
        batch: ForwardBatch,
        some: Extension,
        kv_pages: Tensor,
        plans: dict[str, Any] | None,
    ) -> Tensor:
        """Of some requests of the batch. Those whose pages are far share plans with each other alone."""
        requests, rows = some.requests, some.rows
        start = batch.query_start_B1[requests.start : requests.stop + 1] - rows.start
        context = PagedContext(
            kv_pages,
            batch.page_table_BP[requests],
            batch.seq_len_B[requests],
            start,
            some.num_context,
            some.is_far,
        )
        rotated = ops.rope(q_rope[rows], self._rotation(batch.position_T[rows]))
        plans = None if plans is None else plans.setdefault("far" if some.is_far else "extend", {})
        return ops.mla_extend(q_nope[rows], rotated, context, self.weights.w_kv_b, self.softmax_scale, plans)
