"""What a layer's tokens leave in the hybrid cache: rows of the rings, the entries that they complete, bookmarks.

Whole requests, by HybridPlan, read what earlier steps left, then write; rows, by DecodePlan, write, then read. Knows
nothing of queries.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from eprt import ops
from eprt.layers.compressor import Compressor
from eprt.layers.decode_plan import DecodePlan
from eprt.layers.hybrid_cache import LayerPages
from eprt.layers.hybrid_plan import HybridPlan, SpanGroup
from eprt.ops.elementwise import Rotation
from eprt.ops.shared_attention import SeenRing, SeenTokens
from eprt.ops.turned_rows import RowNorm


@dataclass(frozen=True)
class TokenRows:
    """Of a batch's tokens."""

    key_TD: Tensor  # before norm and rotation
    norm: RowNorm
    rotation: Rotation
    products: dict[str, Tensor]  # fp32 [T, 2 * channels], of which compressors make states; by the names of rings


@dataclass(frozen=True)
class EntryMaker:
    """A layer's compressor, what it keeps in tails, and what it makes in context pages."""

    compressor: Compressor
    state: str
    name: str

    def insert(self, states_S2C: Tensor, index_XR: Tensor, first_X: Tensor, slot_X: Tensor, pages: LayerPages) -> None:
        """states, index: as of Compressor.pool. first: where their windows begin. slot: page * entries of a page +
        place; negative: nowhere."""
        pooled_XD, to = self.compressor.pool(states_S2C, index_XR), pages.context[self.name]
        turned = self.compressor.rotation(first_X), self.compressor.norm
        if self.name == "keys":
            ops.insert_keys(to, slot_X, pooled_XD, pages.index, *turned)
        else:
            ops.insert_rows(to, slot_X, pooled_XD, pages.entry, *turned)

    def page_entries(self, pages: LayerPages) -> int:
        return pages.context[self.name].shape[1]


def insert(
    plan: HybridPlan | DecodePlan, rows: TokenRows, pages: LayerPages, makers: tuple[EntryMaker, ...]
) -> SeenTokens | SeenRing:
    """Returns the tokens that queries see."""
    if isinstance(plan, DecodePlan):
        return _insert_rows(plan, rows, pages, makers)
    return _insert_spans(plan, rows, pages, makers)


def _insert_rows(plan: DecodePlan, rows: TokenRows, pages: LayerPages, makers: tuple[EntryMaker, ...]) -> SeenRing:
    window = pages.tail["window"]
    where = window.rows_PSX, plan.written(window)
    ops.insert_rows(*where, rows.key_TD, pages.entry, rows.rotation, rows.norm)
    for maker in makers:
        ring, ratio = pages.tail[maker.state], maker.compressor.ratio
        maker.compressor.insert_states(
            ring.rows_PSX, plan.written(ring), rows.products[maker.state], rows.rotation.position_T
        )
        slot_T = plan.entry_slots(ratio, maker.page_entries(pages))
        maker.insert(ring.slots_PSD, plan.tokens(ratio, ring), plan.first(ratio), slot_T, pages)
    return SeenRing(window.rows_PSX, plan.page(window), plan.begin_T, plan.end_T)


def _insert_spans(plan: HybridPlan, rows: TokenRows, pages: LayerPages, makers: tuple[EntryMaker, ...]) -> SeenTokens:
    key_TD = ops.turn_rows(rows.key_TD.unsqueeze(1), rows.rotation, rows.norm).squeeze(1)
    of_makers = {
        maker.state: maker.compressor.states(rows.products[maker.state], rows.rotation.position_T) for maker in makers
    }
    left = {"window": pages.entry.encode(key_TD), **of_makers}
    local_XD = left["window"].new_empty(plan.num_local, left["window"].shape[1])
    ops.copy_rows(local_XD, plan.local_T, left["window"], None)
    for group in plan.groups:
        if group.takeovers is not None:
            pages.take_over(group.takeovers)
        window = pages.tail["window"]
        window.gather(group.before.slots(plan.tail_BF, window), local_XD, group.before.at_Y)
        if group.bookmarks is not None and group.marked_NW is not None:
            bookmark = pages.bookmark["window"]
            bookmark.write(group.bookmarks.bookmark(bookmark), local_XD[group.marked_NW])
        for maker in makers:
            _close_entries(maker, plan, group, of_makers[maker.state], pages)
        for name, values in left.items():
            ring = pages.tail[name]
            kept = group.writes(ring.size)
            ring.scatter(kept.slots(plan.tail_BF, ring), values, kept.at_Y)
    if local_XD.dtype != torch.uint8:
        local_XD = local_XD.to(key_TD.dtype)
    return SeenTokens(local_XD, plan.local_begin_T, plan.local_end_T)


def _close_entries(maker: EntryMaker, plan: HybridPlan, group: SpanGroup, rows_T2C: Tensor, pages: LayerPages) -> None:
    """And leaves what bookmarks have of their tokens."""
    ratio = maker.compressor.ratio
    closed = group.closed(ratio)
    if closed is None:
        return
    ring, num_kept = pages.tail[maker.state], len(closed.kept)
    states_S2C = rows_T2C.new_empty(num_kept + len(rows_T2C), *rows_T2C.shape[1:])
    ring.gather(closed.kept.slots(plan.tail_BF, ring), states_S2C)
    states_S2C[num_kept:] = rows_T2C
    slot_X = closed.slots(plan.table_BP, maker.page_entries(pages))
    maker.insert(states_S2C, closed.index_XR, closed.entry_X * ratio, slot_X, pages)
    bookmark = pages.bookmark.get(maker.state)
    if bookmark is not None and group.bookmarks is not None:
        states = states_S2C[closed.index_XR[closed.marked_N, -ratio:]]
        bookmark.write(group.bookmarks.bookmark(bookmark), states[..., : bookmark.slots_PSD.shape[-1]])
