"""CompressedAttention (DeepSeek-V4): attention to a window of single tokens and, behind it, to compressed entries.

One vector per token or entry is key and value at once, for all heads. Its last values are rotated, so the output's are
turned back by the query's position. A sink per head takes part in the softmax's denominator alone. Layers of ratio 0
have the window only; of ratio 128 queries read all entries, of ratio 4 those that an indexer chooses. An entry is seen
from the token on that completes it. The output goes through a product per group of heads, then a joint one.

First all requests insert what they leave in the cache, then all attend. T tokens, N heads, D values of a key, A of the
query latent. Knows nothing of who owns pages.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from eprt import ops
from eprt.config import ModelConfig
from eprt.layers.batch import ForwardBatch
from eprt.layers.compressor import Compressor
from eprt.layers.entry_indexer import EntryIndexer, IndexQueries
from eprt.layers.hybrid_cache import LayerPages
from eprt.layers.hybrid_plan import HybridPlan, SpanGroup
from eprt.layers.linear import JoinedLinear, Linear
from eprt.layers.norm import RMSNorm
from eprt.layers.rope import rotate_last
from eprt.ops.elementwise import Rotation
from eprt.ops.shared_attention import SeenEntries, SeenTokens, shared_attention


@dataclass(frozen=True)
class CompressedAttentionWeights:
    qkv_a: JoinedLinear  # wq_a and wkv
    q_norm: RMSNorm  # of the query latent
    q_b: Linear
    kv_norm: RMSNorm
    sink_N: Tensor  # fp32
    o_a: list[Linear]  # of each group of heads
    o_b: Linear
    compressor: Compressor | None = None  # of ratio 4 and 128
    indexer: EntryIndexer | None = None  # of ratio 4


class CompressedAttention:
    """cos_sin_PR: of the layer's ratio."""

    def __init__(self, config: ModelConfig, weights: CompressedAttentionWeights, cos_sin_PR: Tensor):
        assert config.v4 is not None
        self.config, self.weights, self.cos_sin_PR = config, weights, cos_sin_PR
        self.window, self.head_dim = config.v4.sliding_window, config.v_head_dim
        self.scale, self._ones = self.head_dim**-0.5, torch.ones(self.head_dim)

    def __call__(
        self, x_TH: Tensor, norm: RMSNorm, batch: ForwardBatch, pages: LayerPages, plans: dict[str, Any]
    ) -> Tensor:
        """Of norm(x). plans: what all layers make of this batch once."""
        w, h_TH = self.weights, norm(x_TH)
        q_TA, kv_TD = w.qkv_a(h_TH)
        q_TA = w.q_norm(q_TA)
        rotation = Rotation(self.cos_sin_PR, batch.position_T, True)
        rows = {"window": rotate_last(w.kv_norm(kv_TD).unsqueeze(1), rotation).squeeze(1)}
        rows |= self._project(h_TH, batch.position_T)
        q_TND = rotate_last(self._heads(q_TA), rotation)
        index = None if w.indexer is None else w.indexer.project(q_TA, h_TH, rotation)
        if "hybrid" not in plans:
            plans["hybrid"] = HybridPlan(batch, self.window)
        plan: HybridPlan = plans["hybrid"]
        tokens = SeenTokens(self._insert(plan, rows, pages), plan.local_begin_T, plan.local_end_T)
        out_TND = shared_attention(q_TND, tokens, self._seen_entries(plan, index, pages), w.sink_N, self.scale)
        return self._project_out(rotate_last(out_TND, _reversed(rotation)).to(x_TH.dtype))

    def _heads(self, q_TA: Tensor) -> Tensor:
        """[T, N, D], each head normalised, without weights."""
        q_XD = self.weights.q_b(q_TA).view(-1, self.head_dim)
        normed_XD = ops.rms_norm(q_XD, self._ones, self.config.rms_norm_eps)
        return normed_XD.view(-1, self.config.num_attention_heads, self.head_dim)

    def _project(self, h_TH: Tensor, position_T: Tensor) -> dict[str, Tensor]:
        w, states = self.weights, {}
        if w.compressor is not None:
            states["state"] = w.compressor.project(h_TH, position_T)
        if w.indexer is not None:
            states["index_state"] = w.indexer.compressor.project(h_TH, position_T)
        return states

    def _project_out(self, out_TND: Tensor) -> Tensor:
        groups = out_TND.flatten(1).chunk(len(self.weights.o_a), dim=1)
        return self.weights.o_b(torch.cat([linear(group) for linear, group in zip(self.weights.o_a, groups)], dim=1))

    def _insert(self, plan: HybridPlan, rows: dict[str, Tensor], pages: LayerPages) -> Tensor:
        """Stores what the batch's tokens leave behind. Returns them and the windows before them, [X, D]."""
        w, kv_TD = self.weights, rows["window"]
        local_XD = kv_TD.new_empty(plan.num_local, self.head_dim)
        local_XD[plan.local_T] = kv_TD
        for group in plan.groups:
            for span in group.spans:
                if span.takeover is not None:
                    pages.take_over(span.tail_F, span.takeover, span.start)
            before = group.before
            earlier_YD = pages.tail["window"].gather(plan.tail_BF, before.request_Y, before.position_Y)
            local_XD[before.at_Y] = earlier_YD.to(kv_TD.dtype)
            if w.compressor is not None:
                _close_entries(w.compressor, plan, group, "state", "entries", rows, pages)
            if w.indexer is not None:
                _close_entries(w.indexer.compressor, plan, group, "index_state", "keys", rows, pages)
            _store(plan, group, rows, pages)
        return local_XD

    def _seen_entries(self, plan: HybridPlan, index: IndexQueries | None, pages: LayerPages) -> SeenEntries:
        if not pages.ratio:
            no_pages, none_T = torch.empty(0, 1, self.head_dim), torch.zeros_like(plan.request_T)
            return SeenEntries(no_pages, plan.table_BP, plan.request_T, none_T)
        num_T, entries = entries_seen(plan.position_T, pages.ratio).int(), pages.context["entries"]
        indexer = self.weights.indexer
        if index is None or indexer is None or plan.longest // pages.ratio <= indexer.top_k:
            return SeenEntries(entries, plan.table_BP, plan.request_T, num_T)
        slot_TK = indexer.choose(index, pages.context["keys"], plan.table_BP, plan.request_T, num_T)
        return SeenEntries(entries, plan.table_BP, plan.request_T, num_T.clamp(max=indexer.top_k), slot_TK)


def _close_entries(
    compressor: Compressor,
    plan: HybridPlan,
    group: SpanGroup,
    state: str,
    name: str,
    rows: dict[str, Tensor],
    pages: LayerPages,
) -> None:
    closed = group.closed(compressor.ratio)
    if closed is None:
        return
    kept = pages.tail[state].gather(plan.tail_BF, closed.kept.request_Y, closed.kept.position_Y)
    entries_XD = compressor.pool(torch.cat((kept, rows[state])), closed.index_XR, closed.entry_X)
    pages.insert(name, plan.table_BP, closed.request_X, closed.entry_X, entries_XD)


def _store(plan: HybridPlan, group: SpanGroup, rows: dict[str, Tensor], pages: LayerPages) -> None:
    """Into the tails; and the bookmarks, each of them when its position is passed."""
    for name, values in rows.items():
        ring = pages.tail[name]
        kept = group.writes(ring.size)
        ring.scatter(plan.tail_BF, kept.request_Y, kept.position_Y, values[kept.at_Y])
    for span in group.spans:
        done = span.start
        for end, bookmark in (*span.bookmarks, (span.end, None)) if span.bookmarks else ():
            for name, values in rows.items():
                pages.tail[name].write(span.tail_F, end, values[span.row_of(done) : span.row_of(end)])
            if bookmark is not None:
                pages.leave_bookmark(span.tail_F, bookmark, end)
            done = end


def entries_seen(position: Tensor, ratio: int) -> Tensor:
    """How many entries a query at this position sees: also the one that its own token completes."""
    return (position + 1) // ratio


def _reversed(rotation: Rotation) -> Rotation:
    """The rotation by the negative angle, of a table with this batch's rows alone."""
    cos, sin = rotation.cos_sin_PR[rotation.position_T].chunk(2, dim=1)
    rows_T = torch.arange(len(rotation.position_T))
    return Rotation(torch.cat((cos, -sin), dim=1), rows_T, rotation.interleaved)
