"""CompressedAttention (DeepSeek-V4): attention to a window of single tokens and, behind it, to compressed entries.

One vector per token or entry is key and value at once, for all heads. Its last values are rotated, so the output's are
turned back by the query's position. A sink per head takes part in the softmax's denominator alone. Layers of ratio 0
have the window only; of ratio 128 queries read all entries, of ratio 4 those that an indexer chooses. An entry is seen
from the token on that completes it. The output goes through a product per group of heads, then a joint one.

Requests are computed one after the other: each inserts what it leaves in the cache, then attends. T tokens, n of one
request, N heads, D values of a key, A of the query latent. Knows nothing of who owns pages.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from eprt import ops
from eprt.config import ModelConfig
from eprt.layers.batch import ForwardBatch, TailMove
from eprt.layers.compressor import Compressor
from eprt.layers.entry_indexer import EntryIndexer, IndexQueries
from eprt.layers.hybrid_cache import LayerPages
from eprt.layers.linear import JoinedLinear, Linear
from eprt.layers.norm import RMSNorm
from eprt.layers.rope import rotate_last
from eprt.ops.elementwise import Rotation

_VALUES_AT_ONCE = 1 << 24  # of keys read for, or scores of, some queries: 64 MB


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


@dataclass(frozen=True)
class RequestSpan:
    """One request's part of a batch."""

    rows: slice
    start: int  # position of the first row
    end: int  # behind the last
    table_P: Tensor  # int64, context pages
    tail_F: Tensor  # int64
    takeover: Tensor | None  # int64, pages of the bookmark that the request begins with
    bookmarks: tuple[tuple[int, Tensor], ...]  # (end, pages) that it leaves


@dataclass(frozen=True)
class _Inserted:
    """What a layer computes of all tokens before requests are looked at one by one."""

    kv_TD: Tensor
    states: dict[str, Tensor]  # by compressor: fp32 [T, 2, channels]


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
        inserted = _Inserted(
            rotate_last(w.kv_norm(kv_TD).unsqueeze(1), rotation).squeeze(1), self._project(h_TH, batch.position_T)
        )
        q_TND = rotate_last(self._heads(q_TA), rotation)
        index = None if w.indexer is None else w.indexer.project(q_TA, h_TH, rotation)
        out_TND = torch.empty(q_TND.shape, dtype=torch.float32)
        if "spans" not in plans:
            plans["spans"] = list(read_spans(batch))
        for span in plans["spans"]:
            local_XD = self._insert(span, inserted, pages)
            out_TND[span.rows] = self._attend(span, q_TND[span.rows], local_XD, index, pages)
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

    # -- the cache --

    def _insert(self, span: RequestSpan, inserted: _Inserted, pages: LayerPages) -> Tensor:
        """Stores what the request's tokens leave behind. Returns the window before them, then they themselves: keys
        [up to window - 1 + n, D]."""
        if span.takeover is not None:
            pages.take_over(span.tail_F, span.takeover, span.start)
        before = pages.tail["window"].read(span.tail_F, max(0, span.start - self.window + 1), span.start)
        rows = {"window": inserted.kv_TD[span.rows]}
        rows |= {name: state[span.rows] for name, state in inserted.states.items()}
        w = self.weights
        if w.compressor is not None:
            self._pool(span, w.compressor, "state", "entries", rows, pages)
        if w.indexer is not None:
            self._pool(span, w.indexer.compressor, "index_state", "keys", rows, pages)
        done = span.start
        for end, bookmark in (*span.bookmarks, (span.end, None)):
            for name, values in rows.items():
                pages.tail[name].write(span.tail_F, end, values[done - span.start : end - span.start])
            if bookmark is not None:
                pages.leave_bookmark(span.tail_F, bookmark, end)
            done = end
        return torch.cat((before.to(inserted.kv_TD.dtype), rows["window"]))

    def _pool(
        self,
        span: RequestSpan,
        compressor: Compressor,
        state: str,
        name: str,
        rows: dict[str, Tensor],
        pages: LayerPages,
    ) -> None:
        if span.end // compressor.ratio == span.start // compressor.ratio:
            return
        first = compressor.first_needed(span.start)
        states = torch.cat((pages.tail[state].read(span.tail_F, first, span.start), rows[state]))
        entries_XD = compressor.pool(states, first, span.start, span.end)
        pages.insert(name, span.table_P, span.start // compressor.ratio, entries_XD)

    # -- attention --

    def _attend(
        self, span: RequestSpan, q_nND: Tensor, local_XD: Tensor, index: IndexQueries | None, pages: LayerPages
    ) -> Tensor:
        """fp32 [n, N, D], still rotated."""
        position_n1 = torch.arange(span.start, span.end).unsqueeze(1)
        local_X = torch.arange(span.end - len(local_XD), span.end)
        sees_nX = (local_X <= position_n1) & (local_X > position_n1 - self.window)
        num_entries = 0 if not pages.ratio else span.end // pages.ratio
        if not num_entries:
            return self._attend_shared(q_nND, local_XD, sees_nX)
        visible_n1 = entries_seen(position_n1, pages.ratio)
        if index is not None and num_entries > self._top_k:
            assert self.weights.indexer is not None
            keys_MI = pages.first_entries("keys", span.table_P, num_entries)
            chosen_nK = self.weights.indexer.choose(index.rows(span.rows), keys_MI, visible_n1.squeeze(1))
            return self._attend_chosen(span, q_nND, local_XD, sees_nX, chosen_nK, pages)
        entries_MD = pages.first_entries("entries", span.table_P, num_entries)
        keys_XD = torch.cat((local_XD, entries_MD.to(local_XD.dtype)))
        return self._attend_shared(q_nND, keys_XD, torch.cat((sees_nX, torch.arange(num_entries) < visible_n1), dim=1))

    @property
    def _top_k(self) -> int:
        assert self.weights.indexer is not None
        return self.weights.indexer.top_k

    def _attend_shared(self, q_nND: Tensor, keys_XD: Tensor, sees_nX: Tensor) -> Tensor:
        """All queries of the same keys, some at a time."""
        keys_XD, parts = keys_XD.float(), []
        at_once = max(1, _VALUES_AT_ONCE // (q_nND.shape[1] * len(keys_XD)))
        for q, sees in zip(q_nND.split(at_once), sees_nX.split(at_once)):
            scores = (q.float().flatten(0, 1) @ keys_XD.T).unflatten(0, q.shape[:2]) * self.scale
            weights = self._softmax(scores.masked_fill(~sees.unsqueeze(1), -torch.inf))
            parts.append((weights.flatten(0, 1) @ keys_XD).unflatten(0, q.shape[:2]))
        return torch.cat(parts)

    def _attend_chosen(
        self, span: RequestSpan, q_nND: Tensor, local_XD: Tensor, sees_nX: Tensor, chosen_nK: Tensor, pages: LayerPages
    ) -> Tensor:
        """Each query of the window and of entries of its own, some queries at a time."""
        local_XD, parts = local_XD.float(), []
        at_once = max(1, _VALUES_AT_ONCE // (chosen_nK.shape[1] * self.head_dim))
        for q, sees, chosen in zip(q_nND.split(at_once), sees_nX.split(at_once), chosen_nK.split(at_once)):
            q, entries_nKD = q.float(), pages.select_entries(span.table_P, chosen).float()
            near = (q @ local_XD.T).masked_fill(~sees.unsqueeze(1), -torch.inf)
            far = (q @ entries_nKD.transpose(1, 2)).masked_fill((chosen < 0).unsqueeze(1), -torch.inf)
            weights = self._softmax(torch.cat((near, far), dim=2) * self.scale)
            near, far = weights.split([len(local_XD), chosen.shape[1]], dim=2)
            parts.append(near @ local_XD + far @ entries_nKD)
        return torch.cat(parts)

    def _softmax(self, scores_nNX: Tensor) -> Tensor:
        """With the sinks, which take a share and give nothing."""
        sink_N1 = self.weights.sink_N.unsqueeze(1)
        most = torch.maximum(scores_nNX.amax(dim=2, keepdim=True), sink_N1)
        weights = (scores_nNX - most).exp()
        return weights / (weights.sum(dim=2, keepdim=True) + (sink_N1 - most).exp())


def entries_seen(position: Tensor, ratio: int) -> Tensor:
    """How many entries a query at this position sees: also the one that its own token completes."""
    return (position + 1) // ratio


def read_spans(batch: ForwardBatch) -> Iterator[RequestSpan]:
    """The requests of a batch, in order."""
    assert batch.tail_BF is not None, "a model with a hybrid cache needs each request's tail pages"
    starts, lengths = batch.query_start_B1.tolist(), batch.seq_len_B.tolist()
    tables, tails = batch.page_table_BP.long(), batch.tail_BF.long()
    takeovers = {move.request: _pages(move) for move in batch.takeovers}
    for b, end in enumerate(lengths):
        rows = slice(starts[b], starts[b + 1])
        bookmarks = tuple((move.end, _pages(move)) for move in batch.bookmarks if move.request == b)
        start = end - (rows.stop - rows.start)
        yield RequestSpan(rows, start, end, tables[b], tails[b], takeovers.get(b), bookmarks)


def _pages(move: TailMove) -> Tensor:
    return torch.tensor(move.pages, dtype=torch.int64)


def _reversed(rotation: Rotation) -> Rotation:
    """The rotation by the negative angle, of a table with this batch's rows alone."""
    cos, sin = rotation.cos_sin_PR[rotation.position_T].chunk(2, dim=1)
    rows_T = torch.arange(len(rotation.position_T))
    return Rotation(torch.cat((cos, -sin), dim=1), rows_T, rotation.interleaved)
