"""DecodePlan: as HybridPlan, of a batch of decodes alone, by tensor functions of the batch's tensors.

Each row is worked out by itself, drafts too: every row first writes what it leaves in the rings, then reads its window
and, where it completes an entry, that entry's tokens from there. Rings have room for it: what drafts of one step
overwrite, none of its rows reads. What a row does not do is a negative slot, which nothing is copied from or to. So
shapes depend on the number of rows alone, and a step can be recorded. Padding is decodes in a page that belongs to
nobody.

T tokens, which are requests here; F tail pages, W tokens of a window, R tokens of an entry. Knows nothing of what is
computed.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from eprt.layers.batch import ForwardBatch
from eprt.layers.compressor import OVERLAPPING_RATIO
from eprt.layers.hybrid_cache import PAGE_TOKENS, Ring


@dataclass(frozen=True)
class RowEntries:
    """The entry of one ratio that each row may complete."""

    closes_T: Tensor  # bool
    entry_T: Tensor  # int64, its number
    position_TR: Tensor  # int64, of its tokens; negative ones, before the first token, count for nothing
    index_TR: Tensor  # int64: numbers 0.. of these side by side; -1 for tokens that are not there, and of other rows


class DecodePlan:
    """window: tokens that a query sees, with itself."""

    def __init__(self, batch: ForwardBatch, window: int):
        assert batch.tail_BF is not None, "a model with a hybrid cache needs each request's tail pages"
        self.position_T, self.table_BP = batch.position_T, batch.page_table_BP.long()
        self.longest = self.table_BP.shape[1] * PAGE_TOKENS if batch.longest is None else batch.longest
        self._tail_FT = batch.tail_BF.long().T
        num, device = len(self.position_T), self.position_T.device
        self.request_T = torch.arange(num, dtype=torch.int32, device=device)
        self._window_TW = self.position_T.unsqueeze(1) + torch.arange(1 - window, 1, device=device)
        self.num_local = num * window
        self.local_end_T = torch.arange(window, self.num_local + 1, window, device=device)
        self.local_begin_T = self.local_end_T - 1 - self.position_T.clamp(max=window - 1)
        self._entries: dict[int, RowEntries] = {}
        self._slots: dict[tuple[str, int], Tensor] = {}

    def written(self, ring: Ring) -> Tensor:
        """int64 [T]: the slot of each row."""
        return self._slots_of("rows", ring, self.position_T.unsqueeze(1))

    def window(self, ring: Ring) -> Tensor:
        """int64 [T * W]: slots of each row's window; -1 before the first token."""
        return self._slots_of("window", ring, self._window_TW)

    def tokens(self, ratio: int, ring: Ring) -> Tensor:
        """int64 [T * R]: slots of the tokens of which rows' entries are made; -1 of rows that complete none."""
        entries = self.entries(ratio)
        return self._slots_of("tokens", ring, torch.where(entries.index_TR < 0, -1, entries.position_TR))

    def _slots_of(self, what: str, ring: Ring, position_TX: Tensor) -> Tensor:
        """Rings of one size share the work."""
        if (what, ring.size) not in self._slots:
            slot_FTX = self._tail_FT.unsqueeze(2) * ring.size + position_TX % ring.size
            self._slots[what, ring.size] = torch.where(position_TX < 0, -1, slot_FTX).flatten(1)
        return self._slots[what, ring.size][ring.page]

    def entries(self, ratio: int) -> RowEntries:
        if ratio not in self._entries:
            entry_T, device = self.position_T // ratio, self.position_T.device
            closes_T = (self.position_T + 1) % ratio == 0
            before = ratio if ratio == OVERLAPPING_RATIO else 0
            position_TR = (entry_T * ratio).unsqueeze(1) + torch.arange(-before, ratio, device=device)
            number_TR = torch.arange(position_TR.numel(), device=device).view(position_TR.shape)
            is_there = closes_T.unsqueeze(1) & (position_TR >= 0)
            self._entries[ratio] = RowEntries(closes_T, entry_T, position_TR, torch.where(is_there, number_TR, -1))
        return self._entries[ratio]

    def entry_slots(self, ratio: int, page_entries: int) -> Tensor:
        """int64 [T]: where rows' entries go in pages of so many; -1 of rows that complete none."""
        key = "entries", ratio
        if key not in self._slots:
            entries = self.entries(ratio)
            page_T = self.table_BP.gather(1, (entries.entry_T // page_entries).unsqueeze(1)).squeeze(1)
            slot_T = page_T * page_entries + entries.entry_T % page_entries
            self._slots[key] = torch.where(entries.closes_T, slot_T, -1)
        return self._slots[key]
