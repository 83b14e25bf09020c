"""CompressedAttention (DeepSeek-V4): attention to a window of single tokens and, behind it, to compressed entries.

One vector per token or entry is key and value at once, for all heads. Its last values are rotated, so the output's are
turned back by the query's position. A sink per head takes part in the softmax's denominator alone. Layers of ratio 0
have the window only; of ratio 128 queries read all entries, of ratio 4 those that an indexer chooses. An entry is seen
from the token on that completes it. The output goes through a product per group of heads, then a joint one.

First all requests insert what they leave in the cache, then all attend. T tokens, N heads, D values of a key, A of the
query latent. Knows nothing of who owns pages.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from eprt import ops
from eprt.config import ModelConfig
from eprt.layers.batch import ForwardBatch
from eprt.layers.compressor import Compressor
from eprt.layers.decode_plan import DecodePlan
from eprt.layers.entry_indexer import EntryIndexer, IndexQueries
from eprt.layers.hybrid_cache import LayerPages
from eprt.layers.hybrid_insert import EntryMaker, TokenRows, insert
from eprt.layers.hybrid_plan import HybridPlan
from eprt.layers.linear import JoinedLinear, Linear
from eprt.layers.norm import RMSNorm
from eprt.ops import turn_rows, turned_attention
from eprt.ops.elementwise import Rotation
from eprt.ops.shared_attention import SeenEntries
from eprt.ops.turned_rows import RowNorm
from eprt.ops.weight import Weight


@dataclass(frozen=True)
class CompressedAttentionWeights:
    qkv_a: JoinedLinear  # wq_a and wkv
    q_norm: RMSNorm  # of the query latent
    q_b: Linear
    kv_norm: RMSNorm
    sink_N: Tensor  # fp32
    o_a: Weight  # [groups of heads, o_lora, values of a group]
    o_b: Linear
    compressor: Compressor | None = None  # of ratio 4 and 128
    indexer: EntryIndexer | None = None  # of ratio 4
    # What these need of the hidden states, in fp32: the states of the compressor and of the indexer's, its weights.
    pooled: JoinedLinear | None = None


class CompressedAttention:
    """cos_sin_PR: of the layer's ratio."""

    def __init__(self, config: ModelConfig, weights: CompressedAttentionWeights, cos_sin_PR: Tensor):
        assert config.v4 is not None
        self.config, self.weights, self.cos_sin_PR = config, weights, cos_sin_PR
        self.window, self.head_dim = config.v4.sliding_window, config.v_head_dim
        self.scale = self.head_dim**-0.5
        self.query_norm = RowNorm(config.rms_norm_eps)
        self.key_norm = RowNorm(weights.kv_norm.eps, weights.kv_norm.weight_H)
        self._makers = _makers(weights)

    def __call__(
        self, x_TH: Tensor, norm: RMSNorm, batch: ForwardBatch, pages: LayerPages, plans: dict[str, Any]
    ) -> Tensor:
        """Of norm(x). plans: what all layers make of this batch once."""
        w, h_TH = self.weights, norm(x_TH)
        q_TA, kv_TD = w.qkv_a(h_TH)
        q_TA = w.q_norm(q_TA)
        rotation = Rotation(self.cos_sin_PR, batch.position_T, True)
        products, index = self._project(h_TH, q_TA, rotation, pages)
        plan_of = DecodePlan if batch.by_rows else HybridPlan
        plan: HybridPlan | DecodePlan = once(plans, "hybrid", lambda: plan_of(batch, self.window))
        tokens = insert(plan, TokenRows(kv_TD, self.key_norm, rotation, products), pages, self._makers)
        q_TND = w.q_b(q_TA).unflatten(1, (self.config.num_attention_heads, self.head_dim))
        q_TND = turn_rows(q_TND, rotation, self.query_norm)
        entries = self._seen_entries(plan, index, pages, plans)
        return self._project_out(
            turned_attention(q_TND, tokens, entries, w.sink_N, self.scale, rotation, dtype=x_TH.dtype)
        )

    def _project(
        self, h_TH: Tensor, q_TA: Tensor, rotation: Rotation, pages: LayerPages
    ) -> tuple[dict[str, Tensor], IndexQueries | None]:
        """(the compressors' products, the indexer's queries), as far as the layer has them."""
        w = self.weights
        if w.pooled is None or w.compressor is None:
            return {}, None
        product_TC, *of_index = w.pooled.in_fp32(h_TH)
        if w.indexer is None:
            return {"state": product_TC}, None
        index = w.indexer.project(q_TA, of_index[1], rotation, pages.context["keys"])
        return {"state": product_TC, "index_state": of_index[0]}, index

    def _project_out(self, out_TND: Tensor) -> Tensor:
        return self.weights.o_b(ops.group_linear(out_TND.flatten(1), self.weights.o_a))

    def _seen_entries(
        self, plan: HybridPlan | DecodePlan, index: IndexQueries | None, pages: LayerPages, plans: dict[str, Any]
    ) -> SeenEntries:
        if not pages.ratio:
            entry, none_T = pages.entry, torch.zeros_like(plan.request_T)
            no_pages = torch.empty(0, 1, entry.width, dtype=entry.dtype, device=none_T.device)
            return SeenEntries(no_pages, plan.table_BP, plan.request_T, none_T)
        indexer, entries = self.weights.indexer, pages.context["entries"]
        most = None if indexer is None else indexer.top_k
        num_T, num_read_T = once(plans, f"entries of {pages.ratio}", lambda: seen_and_read(plan, pages.ratio, most))
        if index is None or indexer is None or plan.longest // pages.ratio <= indexer.top_k:
            return SeenEntries(entries, plan.table_BP, plan.request_T, num_T)
        slot_TK = indexer.choose(index, pages.context["keys"], plan.table_BP, plan.request_T, num_T)
        return SeenEntries(entries, plan.table_BP, plan.request_T, num_read_T, slot_TK)


def _makers(weights: CompressedAttentionWeights) -> tuple[EntryMaker, ...]:
    makers = []
    if weights.compressor is not None:
        makers.append(EntryMaker(weights.compressor, "state", "entries"))
    if weights.indexer is not None:
        makers.append(EntryMaker(weights.indexer.compressor, "index_state", "keys"))
    return tuple(makers)


def once(plans: dict[str, Any], name: str, make: Callable[[], Any]) -> Any:
    """What all layers make of a batch: the first one makes it."""
    if name not in plans:
        plans[name] = make()
    return plans[name]


def seen_and_read(plan: HybridPlan | DecodePlan, ratio: int, most: int | None) -> tuple[Tensor, Tensor]:
    """int32 [T]: how many entries queries see, and how many of them they read, which is at most `most`."""
    num_T = entries_seen(plan.position_T, ratio).int()
    return num_T, num_T if most is None else num_T.clamp(max=most)


def entries_seen(position: Tensor, ratio: int) -> Tensor:
    """How many entries a query at this position sees: also the one that its own token completes."""
    return (position + 1) // ratio
