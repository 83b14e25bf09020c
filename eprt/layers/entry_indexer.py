"""EntryIndexer (DeepSeek-V4): chooses, for each query, which compressed entries its attention reads.

An entry's score is the sum over index heads of weight * relu(query . key), with keys from a compressor of its own. The
best index_topk of the entries that a query may see are read; of equal ones the lower position counts as better,
whatever the batch or chunk. Scores are computed in pieces of bounded size (csrc/cpu/index_topk_kernel.h).

T queries, J index heads, I values of a key. Knows nothing of where keys are kept.
"""

from dataclasses import dataclass

from torch import Tensor

from eprt.config import ModelConfig
from eprt.layers.compressor import Compressor
from eprt.layers.linear import Linear
from eprt.ops import index_topk, turned_queries
from eprt.ops.elementwise import Rotation


@dataclass(frozen=True)
class IndexQueries:
    """Of some tokens."""

    query_TJI: Tensor
    weight_TJ: Tensor  # fp32, with the scale of the scores


class EntryIndexer:
    """queries: wq_b, from the normalised query latent."""

    def __init__(self, config: ModelConfig, queries: Linear, compressor: Compressor):
        assert config.v4 is not None
        self.num_heads, self.key_size = config.v4.index_n_heads, config.v4.index_head_dim
        self.top_k, self.queries, self.compressor = config.v4.index_topk, queries, compressor

    def project(self, q_TA: Tensor, weight_TJ: Tensor, rotation: Rotation, key_pages: Tensor) -> IndexQueries:
        """weight_TJ: fp32, weights_proj's product with the hidden states. key_pages: whose keys they are to meet."""
        query_TJI = self.queries(q_TA).unflatten(1, (self.num_heads, self.key_size))
        scale = self.key_size**-0.5 * self.num_heads**-0.5
        return IndexQueries(turned_queries(query_TJI, rotation, key_pages.dtype), weight_TJ * scale)

    def choose(
        self, queries: IndexQueries, key_pages: Tensor, table_BP: Tensor, request_T: Tensor, num_T: Tensor
    ) -> Tensor:
        """int32 [T, top_k]: slots of the entries that queries read, by position; -1 behind the last one.

        key_pages: [P, E, width], as IndexFormat says. table_BP: the requests' pages. num_T: int32, entries that a query
        sees.
        """
        return index_topk(queries.query_TJI, queries.weight_TJ, key_pages, table_BP, request_T, num_T, top_k=self.top_k)
