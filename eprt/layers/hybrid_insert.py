"""What a layer's tokens leave in the hybrid cache: their places in the rings, the entries that they complete, bookmarks.

By HybridPlan of whole requests, which read what earlier steps left, then write; by DecodePlan of rows, which write, then
read. Both return the tokens that queries see, side by side. Knows nothing of queries.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from eprt import ops
from eprt.layers.compressor import OVERLAPPING_RATIO, Compressor
from eprt.layers.decode_plan import DecodePlan
from eprt.layers.hybrid_cache import LayerPages
from eprt.layers.hybrid_plan import HybridPlan, SpanGroup
from eprt.ops.indexer import as_cached


@dataclass(frozen=True)
class EntryMaker:
    """A layer's compressor, what it keeps in tails, and what it makes in context pages."""

    compressor: Compressor
    state: str
    name: str

    def insert(self, states_S2C: Tensor, index_XR: Tensor, entry_X: Tensor, slot_X: Tensor, pages: LayerPages) -> None:
        """index: which states entries are made of, as Compressor.pool has it."""
        entries_XD = self.compressor.pool(states_S2C, index_XR, entry_X)
        if self.name == "keys":
            entries_XD = as_cached(entries_XD.unsqueeze(1), pages.context[self.name].dtype).squeeze(1)
        pages.insert(self.name, slot_X, entries_XD)

    def page_entries(self, pages: LayerPages) -> int:
        return pages.context[self.name].shape[1]


Makers = tuple[EntryMaker, ...]


def insert(plan: HybridPlan | DecodePlan, rows: dict[str, Tensor], pages: LayerPages, makers: Makers) -> Tensor:
    """rows: by the names of rings, what each token leaves there. Returns the plan's local rows, as they are stored."""
    return (_insert_rows if isinstance(plan, DecodePlan) else _insert_spans)(plan, rows, pages, makers)


def _insert_rows(plan: DecodePlan, rows: dict[str, Tensor], pages: LayerPages, makers: Makers) -> Tensor:
    for name, values in rows.items():
        ring = pages.tail[name]
        ring.scatter(plan.written(ring), values, None)
    for maker in makers:
        ring, ratio = pages.tail[maker.state], maker.compressor.ratio
        entries, slot_Y = plan.entries(ratio), plan.tokens(ratio, ring)
        states_S2C = rows[maker.state].new_empty(len(slot_Y), *rows[maker.state].shape[1:])
        ring.gather(slot_Y, states_S2C)
        slot_T = plan.entry_slots(ratio, maker.page_entries(pages))
        maker.insert(states_S2C, entries.index_TR, entries.entry_T, slot_T, pages)
    local_XD = rows["window"].new_empty(plan.num_local, rows["window"].shape[1])
    window = pages.tail["window"]
    window.gather(plan.window(window), local_XD)
    return local_XD


def _insert_spans(plan: HybridPlan, rows: dict[str, Tensor], pages: LayerPages, makers: Makers) -> Tensor:
    stored_TD = rows["window"]
    local_XD = stored_TD.new_empty(plan.num_local, stored_TD.shape[1])
    ops.copy_rows(local_XD, plan.local_T, stored_TD, None)
    for group in plan.groups:
        if group.takeovers is not None:
            pages.take_over(group.takeovers)
        window = pages.tail["window"]
        window.gather(group.before.slots(plan.tail_BF, window), local_XD, group.before.at_Y)
        if group.bookmarks is not None and group.marked_NW is not None:
            bookmark = pages.bookmark["window"]
            bookmark.write(group.bookmarks.bookmark(bookmark), local_XD[group.marked_NW])
        for maker in makers:
            _close_entries(maker, plan, group, rows[maker.state], pages)
        for name, values in rows.items():
            ring = pages.tail[name]
            kept = group.writes(ring.size)
            ring.scatter(kept.slots(plan.tail_BF, ring), values, kept.at_Y)
    return local_XD


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
    maker.insert(states_S2C, closed.index_XR, closed.entry_X, slot_X, pages)
    bookmark = pages.bookmark.get(maker.state)
    if bookmark is not None and group.bookmarks is not None:
        states = states_S2C[closed.index_XR[closed.marked_N, -ratio:]]
        bookmark.write(group.bookmarks.bookmark(bookmark), states[..., : bookmark.slots_PSD.shape[-1]])
