"""Indexer: which cached tokens a query attends to (DeepSeek Sparse Attention, DeepSeek-V3.2-Exp).

It has queries of several heads, made from the query latent, and one key per token, made from the layer's input, which
it caches beside the latents. A token's score is sum_h weight_h * relu(query_h . key); the best top_k are chosen.

Rotary pairs are (i, i + R/2) here, of the first R values, whatever they are in the attention itself. Keys of an fp8
cache and their queries are transformed (IndexFormat). Knows nothing of the attention.

N heads, D values of a head, A of the query latent, X rows to choose for, K chosen tokens.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from eprt import ops
from eprt.config import IndexerConfig
from eprt.layers.batch import ForwardBatch
from eprt.layers.chosen_rows import ChosenRows
from eprt.layers.linear import Linear
from eprt.ops.elementwise import Rotation

# Of the key's norm: its own, whatever the model's rms_norm_eps is.
KEY_NORM_EPS = 1e-6


@dataclass(frozen=True)
class IndexerWeights:
    query: Linear  # wq_b, [N * D, A]
    key: Linear  # wk, [D, H]
    key_norm_D: Tensor  # fp32: LayerNorm, with bias
    key_norm_bias_D: Tensor  # fp32
    head_weights: Linear  # weights_proj, [N, H], whose products are fp32


class Indexer:
    """cos_sin_PR: the attention's own table."""

    def __init__(self, config: IndexerConfig, weights: IndexerWeights, cos_sin_PR: Tensor):
        self.config, self.weights, self.cos_sin_PR = config, weights, cos_sin_PR
        self.score_scale = (config.num_heads * config.head_dim) ** -0.5

    def insert(self, h_TH: Tensor, batch: ForwardBatch, key_pages: Tensor) -> None:
        """Caches the keys of the batch's tokens. h_TH: the attention's normalised input."""
        w, rotation = self.weights, self._rotation(batch.position_T)
        norm = w.key_norm_D, w.key_norm_bias_D, KEY_NORM_EPS
        ops.index_key_insert(key_pages, batch.kv_slot_T, w.key(h_TH), *norm, rotation)

    def choose(
        self, h_XH: Tensor, q_latent_XA: Tensor, rows: ChosenRows, page_table_BP: Tensor, key_pages: Tensor
    ) -> Tensor:
        """int32 [X, K]: see ops.index_topk. Of rows.row_X: h_XH, the attention's normalised input; q_latent_XA, the
        normalised query latent."""
        c = self.config
        query_XND = self.weights.query(q_latent_XA).view(-1, c.num_heads, c.head_dim)
        query_XND = ops.index_queries(query_XND, self._rotation(rows.position_X), key_pages.dtype)
        weight_XN = self.weights.head_weights(h_XH, torch.float32) * self.score_scale
        return ops.index_topk(query_XND, weight_XN, key_pages, page_table_BP, rows.request_X, rows.length_X, c.top_k)

    def _rotation(self, position_T: Tensor) -> Rotation:
        return Rotation(self.cos_sin_PR, position_T, interleaved=False)
