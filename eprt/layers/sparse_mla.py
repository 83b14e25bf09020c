"""SparseMLA: latent attention to the tokens that an indexer chooses (DeepSeek-V3.2).

Rows that see no more tokens than are chosen attend to all of them, as MLA does and at its cost; only the index keys are
cached for later. The other rows attend in the absorbed form, each to tokens of its own.
"""

from typing import Any

import torch
from torch import Tensor

from eprt import ops
from eprt.config import ModelConfig
from eprt.layers.batch import ForwardBatch
from eprt.layers.chosen_rows import ChosenRows
from eprt.layers.indexer import Indexer
from eprt.layers.layer_cache import LayerCache
from eprt.layers.mla import MLA, MLAWeights
from eprt.layers.norm import RMSNorm


class SparseMLA(MLA):
    def __init__(self, config: ModelConfig, weights: MLAWeights, indexer: Indexer, cos_sin_PR: Tensor):
        super().__init__(config, weights, cos_sin_PR)
        self.indexer = indexer

    def __call__(
        self, x_TH: Tensor, norm: RMSNorm, batch: ForwardBatch, cache: LayerCache, plans: dict[str, Any] | None = None
    ) -> Tensor:
        w, plans = self.weights, {} if plans is None else plans
        assert w.q_a_norm is not None and w.q_b is not None and cache.index_keys is not None
        h_TH = norm(x_TH)
        q_TA, kv_TD = w.qkv_a(h_TH)
        entries = cache.latents, batch.kv_slot_T, kv_TD, w.kv_a_norm.weight_H, w.kv_a_norm.eps
        rotation = self._rotation(batch.position_T)
        q_latent_TA = ops.norm_insert(q_TA, w.q_a_norm.weight_H, w.q_a_norm.eps, *entries, rotation)
        q_nope_TNC, q_rope_TNR = self._parts_of_heads(w.q_b(q_latent_TA))
        self.indexer.insert(h_TH, batch, cache.index_keys)
        if "chosen rows" not in plans:
            plans["chosen rows"] = ChosenRows.from_batch(batch, cache.page_size, self.indexer.config.top_k)
        rows: ChosenRows = plans["chosen rows"]
        if rows.num_rows == 0:
            return w.o(self._attend(q_nope_TNC, q_rope_TNR, batch, cache.latents, plans).flatten(1))
        inputs = h_TH, q_latent_TA, q_nope_TNC, q_rope_TNR
        if rows.row_X is not None:
            h_TH, q_latent_TA, q_nope_TNC, q_rope_TNR = (x[rows.row_X] for x in inputs)
        where = batch.page_table_BP, cache, plans
        out_XNV = self._attend_chosen(h_TH, q_latent_TA, q_nope_TNC, q_rope_TNR, rows, *where)
        if rows.whole is None:
            return w.o(out_XNV.flatten(1))
        q_nope_WNC, q_rope_WNR = (x[rows.whole_W] for x in inputs[2:])
        out_WNV = self._attend(q_nope_WNC, q_rope_WNR, rows.whole, cache.latents, plans)
        out_TNV = torch.empty(batch.num_tokens, *out_WNV.shape[1:], dtype=out_WNV.dtype, device=out_WNV.device)
        out_TNV[rows.whole_W], out_TNV[rows.row_X] = out_WNV, out_XNV
        return w.o(out_TNV.flatten(1))

    def between(self, norm: RMSNorm, next_norm: RMSNorm) -> None:
        """Tokens are chosen amid attention."""

    def _attend_chosen(
        self,
        h_XH: Tensor,
        q_latent_XA: Tensor,
        q_nope_XNC: Tensor,
        q_rope_XNR: Tensor,
        rows: ChosenRows,
        page_table_BP: Tensor,
        cache: LayerCache,
        plans: dict[str, Any],
    ) -> Tensor:
        """[X, N, value]."""
        assert cache.index_keys is not None
        slot_XK = self.indexer.choose(h_XH, q_latent_XA, rows, page_table_BP, cache.index_keys)
        length_X = rows.length_X.clamp(max=slot_XK.shape[1])
        how = self.weights.w_kv_b, self.softmax_scale, self._rotation(rows.position_X)
        return ops.mla_chosen(q_nope_XNC, q_rope_XNR, cache.latents, slot_XK, length_X, *how, plans)
