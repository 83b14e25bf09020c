"""Multi-head latent attention over the paged latent cache (DeepSeek-V2, arXiv:2405.04434).

N heads, C latent (kv_lora_rank), R rotary dimensions, D = C + R cached values per token.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from eprt import ops
from eprt.config import ModelConfig
from eprt.layers.batch import ForwardBatch
from eprt.layers.linear import Linear
from eprt.layers.norm import RMSNorm
from eprt.layers.rope import softmax_scale

# The norms of both latents use their class's default, not the model's rms_norm_eps, in DeepSeek's code and everywhere.
LATENT_NORM_EPS = 1e-6


@dataclass(frozen=True)
class MLAWeights:
    """q: q_proj alone, or None with q_a, q_a_norm and q_b. w_kv_b: [N * (nope + value), C], never quantised."""

    q: Linear | None
    q_a: Linear | None
    q_a_norm: RMSNorm | None
    q_b: Linear | None
    kv_a: Linear
    kv_a_norm: RMSNorm
    w_kv_b: Tensor
    o: Linear


class MLA:
    def __init__(self, config: ModelConfig, weights: MLAWeights, cos_sin_PR: Tensor):
        self.config, self.weights, self.cos_sin_PR = config, weights, cos_sin_PR
        self.rotate = ops.rope_interleaved if config.rope_interleave else ops.rope_half
        self.softmax_scale = softmax_scale(config.rope, config.qk_head_dim)

    def __call__(self, x_TH: Tensor, batch: ForwardBatch, kv_pages: Tensor) -> Tensor:
        """Writes this batch's cache entries, then attends. kv_pages: [pages, page_size, D], or as KVFormat says."""
        q_nope_TNC, q_rope_TNR = self._queries(x_TH, batch)
        self._insert(x_TH, batch, kv_pages)
        return self.weights.o(self._attend(q_nope_TNC, q_rope_TNR, batch, kv_pages).flatten(1))

    def _queries(self, x_TH: Tensor, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        w, c = self.weights, self.config
        if w.q is not None:
            q = w.q(x_TH)
        else:
            assert w.q_a is not None and w.q_a_norm is not None and w.q_b is not None
            q = w.q_b(w.q_a_norm(w.q_a(x_TH)))
        q = q.view(-1, c.num_attention_heads, c.qk_head_dim)
        q_nope, q_rope = q.split([c.qk_nope_head_dim, c.qk_rope_head_dim], dim=-1)
        return q_nope, self.rotate(q_rope, self.cos_sin_PR, batch.position_T)

    def _insert(self, x_TH: Tensor, batch: ForwardBatch, kv_pages: Tensor) -> None:
        norm, interleaved = self.weights.kv_a_norm, self.config.rope_interleave
        where, rotation = (kv_pages, batch.kv_slot_T), (self.cos_sin_PR, batch.position_T, interleaved)
        ops.latent_insert(*where, self.weights.kv_a(x_TH), norm.weight_H, norm.eps, *rotation)

    def _attend(self, q_nope: Tensor, q_rope: Tensor, batch: ForwardBatch, kv_pages: Tensor) -> Tensor:
        """[T, N, value]: the decode rows absorbed, the rows of prompts by extension, both in one step."""
        d, w_kv_b, scale = batch.num_decode, self.weights.w_kv_b, self.softmax_scale
        page_table, seq_len = batch.page_table_BP, batch.seq_len_B
        parts = []
        if d:
            parts.append(ops.mla_decode(q_nope[:d], q_rope[:d], kv_pages, page_table[:d], seq_len[:d], w_kv_b, scale))
        if d < seq_len.shape[0]:
            where = kv_pages, page_table[d:], seq_len[d:], batch.query_start_B1[d:] - d
            parts.append(ops.mla_extend(q_nope[d:], q_rope[d:], *where, w_kv_b, scale, batch.num_context))
        if not parts:
            return q_nope.new_empty(0, q_nope.shape[1], self.config.v_head_dim)
        return parts[0] if len(parts) == 1 else torch.cat(parts)
