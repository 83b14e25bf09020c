"""EntryIndexer (DeepSeek-V4): chooses, for each query, which compressed entries its attention reads.

An entry's score is the sum over index heads of weight * relu(query . key), with keys from a compressor of its own. The
best index_topk of the entries that a query may see are read: the higher score first, of equal ones the lower position,
whatever the batch or chunk. Scores are computed in pieces of bounded size.

n queries, M entries, J index heads, I values of a key. Knows nothing of where keys are kept.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from eprt.config import ModelConfig
from eprt.layers.compressor import Compressor
from eprt.layers.linear import Linear
from eprt.layers.rope import rotate_last
from eprt.ops.elementwise import Rotation

_SCORES_AT_ONCE = 1 << 24  # products of queries and keys, 64 MB


@dataclass(frozen=True)
class IndexQueries:
    """Of some tokens."""

    query_TJI: Tensor
    weight_TJ: Tensor  # fp32, with the scale of the scores

    def rows(self, rows: slice) -> "IndexQueries":
        return IndexQueries(self.query_TJI[rows], self.weight_TJ[rows])


class EntryIndexer:
    """queries: wq_b, from the normalised query latent. weights: weights_proj, of the hidden states."""

    def __init__(self, config: ModelConfig, queries: Linear, weights: Linear, compressor: Compressor):
        assert config.v4 is not None
        self.num_heads, self.key_size = config.v4.index_n_heads, config.v4.index_head_dim
        self.top_k, self.queries, self.weights, self.compressor = config.v4.index_topk, queries, weights, compressor

    def project(self, q_TA: Tensor, h_TH: Tensor, rotation: Rotation) -> IndexQueries:
        query_TJI = rotate_last(self.queries(q_TA).unflatten(1, (self.num_heads, self.key_size)), rotation)
        scale = self.key_size**-0.5 * self.num_heads**-0.5
        return IndexQueries(query_TJI, self.weights(h_TH, torch.float32) * scale)

    def choose(self, queries: IndexQueries, key_MI: Tensor, num_visible_n: Tensor) -> Tensor:
        """int64 [n, min(top_k, M)]: entries 0..M-1, -1 beyond those that the query sees, which are the first
        num_visible_n."""
        top_k, keys_IM = min(self.top_k, len(key_MI)), key_MI.float().T
        at_once, chosen = max(1, _SCORES_AT_ONCE // (self.num_heads * len(key_MI))), []
        for begin in range(0, len(num_visible_n), at_once):
            part = queries.rows(slice(begin, begin + at_once))
            visible_n1 = num_visible_n[begin : begin + at_once, None]
            products = torch.relu(part.query_TJI.float() @ keys_IM)
            score_nM = (part.weight_TJ.unsqueeze(1) @ products).squeeze(1)
            score_nM = score_nM.masked_fill(torch.arange(len(key_MI)) >= visible_n1, -torch.inf)
            best_nK = score_nM.sort(dim=1, descending=True, stable=True).indices[:, :top_k]
            chosen.append(best_nK.masked_fill(best_nK >= visible_n1, -1))
        return torch.cat(chosen)
