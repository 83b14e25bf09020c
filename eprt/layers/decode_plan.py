"""DecodePlan: as HybridPlan, of a batch of decodes alone, by tensor functions of the batch's tensors.

Each row is worked out by itself, drafts too: every row first writes what it leaves in the rings, then reads its window
and, where it completes an entry, that entry's tokens from there. Rings have room for it: what drafts of one step
overwrite, none of its rows reads. What a row does not do is a negative slot, which nothing is copied from or to. So
shapes depend on the number of rows alone, and a step can be recorded. Padding is decodes in a page that belongs to
nobody.

T tokens, which are requests here; F tail pages, R tokens of an entry. Knows nothing of what is computed.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from eprt.layers.batch import ForwardBatch
from eprt.layers.compressor import tokens_before
from eprt.layers.hybrid_cache import PAGE_TOKENS, Ring


class DecodePlan:
    """window: tokens that a query sees, with itself."""

    def __init__(self, batch: ForwardBatch, window: int):
        assert batch.tail_BF is not None, "a model with a hybrid cache needs each request's tail pages"
        self.position_T, self.table_BP = batch.position_T, batch.page_table_BP.long()
        self.longest = self.table_BP.shape[1] * PAGE_TOKENS if batch.longest is None else batch.longest
        self.request_T = torch.arange(len(self.position_T), dtype=torch.int32, device=self.position_T.device)
        self.end_T = self.position_T + 1
        self.begin_T = (self.end_T - window).clamp(min=0)
        self._tail_FT = batch.tail_BF.long().T.contiguous()
        self._made: dict[tuple[str, int], Tensor] = {}

    def page(self, ring: Ring) -> Tensor:
        """int64 [T]: each row's page of a ring."""
        return self._tail_FT[ring.page]

    def written(self, ring: Ring) -> Tensor:
        """int64 [T]: the slot of each row."""
        return self._slots_of("rows", ring, lambda: self.position_T)

    def tokens(self, ratio: int, ring: Ring) -> Tensor:
        """int64 [T, R]: slots of the tokens of which rows' entries are made, in the order of Compressor.pool; -1 for
        those before the first token, and of rows that complete no entry."""

        def positions() -> Tensor:
            first_T = torch.where(self.closes(ratio), self.end_T - ratio, -ratio)
            offsets = torch.arange(-tokens_before(ratio), ratio, device=first_T.device)
            return first_T.unsqueeze(1) + offsets

        return self._slots_of(f"tokens of {ratio}", ring, positions)

    def closes(self, ratio: int) -> Tensor:
        """bool [T]: which rows complete an entry."""
        return self._once("closes", ratio, lambda: self.end_T % ratio == 0)

    def first(self, ratio: int) -> Tensor:
        """int64 [T]: where the windows of rows' entries begin."""
        return self._once("first", ratio, lambda: self.position_T // ratio * ratio)

    def entry_slots(self, ratio: int, page_entries: int) -> Tensor:
        """int64 [T]: where rows' entries go in pages of so many; -1 of rows that complete none."""

        def slots() -> Tensor:
            entry_T = self.position_T // ratio
            page_T = self.table_BP.gather(1, (entry_T // page_entries).unsqueeze(1)).squeeze(1)
            return torch.where(self.closes(ratio), page_T * page_entries + entry_T % page_entries, -1)

        return self._once("entries", ratio, slots)

    def _slots_of(self, what: str, ring: Ring, positions: Callable[[], Tensor]) -> Tensor:
        """Rings of one size share the work. positions: [T] or [T, R]."""

        def slots() -> Tensor:
            position = positions()
            page = self._tail_FT.view(*self._tail_FT.shape, *[1] * (position.dim() - 1))
            return torch.where(position < 0, -1, page * ring.size + position % ring.size)

        return self._once(what, ring.size, slots)[ring.page]

    def _once(self, what: str, number: int, make: Callable[[], Tensor]) -> Tensor:
        """For all layers: each of these tensors takes several kernels."""
        if (what, number) not in self._made:
            self._made[what, number] = make()
        return self._made[what, number]
