"""HybridPlan: where a batch's tokens go in the hybrid cache and what is read of it, worked out once for all layers.

Requests are inserted in groups, in order: a group reads what its requests left in earlier steps, then writes. Only a
request that begins with a bookmark which another request of the same batch leaves has to wait for a later group.

T tokens, B requests, F tail pages. Y positions that are read or written. Knows nothing of what is computed.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from eprt.layers.batch import ForwardBatch, TailMove
from eprt.layers.compressor import first_needed, tokens_of
from eprt.layers.hybrid_cache import Ring


@dataclass(frozen=True)
class RequestSpan:
    """One request's part of a batch."""

    request: int  # of the batch, whose pages hold them
    rows: slice
    start: int  # position of the first row
    end: int  # behind the last
    tail_F: Tensor  # int64
    takeover: Tensor | None  # int64, pages of the bookmark that the request begins with
    bookmarks: tuple[tuple[int, Tensor], ...]  # (end, pages) that it leaves

    def row_of(self, position: int) -> int:
        return self.rows.start + position - self.start


@dataclass(frozen=True)
class Places:
    """Some positions of requests, and where their values are or go in another tensor. int64 [Y]."""

    request_Y: Tensor
    position_Y: Tensor
    at_Y: Tensor
    _slots: dict[tuple[int, int], Tensor] = field(default_factory=dict, init=False)

    @staticmethod
    def join(parts: Sequence[tuple[int, range, int]]) -> "Places":
        """Of (request, positions, where the first one is)."""
        columns = [(request, each.start, first, len(each)) for request, each, first in parts]
        request_N, start_N, first_N, length_N = np.array(columns, np.int64).reshape(-1, 4).T
        within_Y = np.arange(length_N.sum()) - np.repeat(length_N.cumsum() - length_N, length_N)
        position_Y, at_Y = (np.repeat(each, length_N) + within_Y for each in (start_N, first_N))
        return Places(*(torch.from_numpy(each) for each in (np.repeat(request_N, length_N), position_Y, at_Y)))

    def slots(self, tail_BF: Tensor, ring: Ring) -> Tensor:
        """int64 [Y], of a ring. The same for all rings of one size on one page."""
        key = ring.page, ring.size
        if key not in self._slots:
            self._slots[key] = tail_BF[self.request_Y, ring.page] * ring.size + self.position_Y % ring.size
        return self._slots[key]

    def __len__(self) -> int:
        return len(self.at_Y)


@dataclass(frozen=True)
class ClosedEntries:
    """The X entries of one ratio that a group completes. Their tokens' projections: those that tails keep, then those
    of the batch's rows."""

    kept: Places
    index_XR: Tensor  # int64, -1 for none
    request_X: Tensor  # int64
    entry_X: Tensor  # int64
    _slots: dict[int, Tensor] = field(default_factory=dict, init=False)

    def slots(self, table_BP: Tensor, page_entries: int) -> Tensor:
        """int64 [X]: where they go in pages of so many entries."""
        if page_entries not in self._slots:
            page_X = table_BP[self.request_X, self.entry_X // page_entries]
            self._slots[page_entries] = page_X * page_entries + self.entry_X % page_entries
        return self._slots[page_entries]


@dataclass
class SpanGroup:
    """Requests that are inserted together."""

    spans: list[RequestSpan]
    before: Places  # windows before the requests' first rows; where in the local rows they go
    _writes: dict[int, Places] = field(default_factory=dict)
    _closed: dict[int, ClosedEntries | None] = field(default_factory=dict)

    def writes(self, size: int) -> Places:
        """What rings of this size keep of each request's rows, but of those that leave bookmarks."""
        if size not in self._writes:
            kept = ((span, max(span.start, span.end - size)) for span in self.spans if not span.bookmarks)
            parts = [(span.request, range(first, span.end), span.row_of(first)) for span, first in kept]
            self._writes[size] = Places.join(parts)
        return self._writes[size]

    def closed(self, ratio: int) -> ClosedEntries | None:
        if ratio not in self._closed:
            self._closed[ratio] = _closed_entries(self.spans, ratio)
        return self._closed[ratio]


class HybridPlan:
    """window: tokens that a query sees, with itself."""

    def __init__(self, batch: ForwardBatch, window: int):
        assert batch.tail_BF is not None, "a model with a hybrid cache needs each request's tail pages"
        self.tail_BF, self.table_BP = batch.tail_BF.long(), batch.page_table_BP.long()
        self.spans = list(read_spans(batch, self.tail_BF))
        self.longest = max((span.end for span in self.spans), default=0)
        self.groups: list[SpanGroup] = []
        rows, num_local = [], 0
        for spans in _in_groups(self.spans):
            before = []
            for span in spans:
                first = max(0, span.start - window + 1)
                before.append((span.request, range(first, span.start), num_local))
                rows.append((span.request, range(span.start, span.end), num_local + span.start - first))
                num_local += span.end - first
            self.groups.append(SpanGroup(spans, Places.join(before)))
        of_rows = Places.join(rows)
        self.num_local = num_local  # rows of windows before requests and of the batch's tokens, side by side
        self.local_T, self.request_T = of_rows.at_Y, of_rows.request_Y.int()
        self.position_T = of_rows.position_Y
        self.local_begin_T = self.local_T - self.position_T.clamp(max=window - 1)
        self.local_end_T = self.local_T + 1


def read_spans(batch: ForwardBatch, tail_BF: Tensor) -> Iterator[RequestSpan]:
    """The requests of a batch, in order. Tokens of one request that follow each other as requests of their own, as
    drafts do, are put together: the later ones see the earlier."""
    starts, lengths, tails = batch.query_start_B1.tolist(), batch.seq_len_B.tolist(), tail_BF.tolist()
    takeovers = {move.request: _pages(move) for move in batch.takeovers}
    first = 0
    for b, end in enumerate(lengths):
        next_start = None if b + 1 == len(lengths) else lengths[b + 1] - (starts[b + 2] - starts[b + 1])
        if next_start == end and tails[b + 1] == tails[b]:
            continue
        rows = slice(starts[first], starts[b + 1])
        bookmarks = tuple((move.end, _pages(move)) for move in batch.bookmarks if first <= move.request <= b)
        yield RequestSpan(b, rows, end - (rows.stop - rows.start), end, tail_BF[b], takeovers.get(first), bookmarks)
        first = b + 1


def _in_groups(spans: list[RequestSpan]) -> list[list[RequestSpan]]:
    groups: list[list[RequestSpan]] = [[]]
    left: set[int] = set()  # pages of bookmarks that the group leaves
    for span in spans:
        if span.takeover is not None and left.intersection(span.takeover.tolist()):
            groups.append([])
            left.clear()
        groups[-1].append(span)
        left.update(page for _, pages in span.bookmarks for page in pages.tolist())
    return groups


def _closed_entries(spans: list[RequestSpan], ratio: int) -> ClosedEntries | None:
    closing = [span for span in spans if span.end // ratio > span.start // ratio]
    if not closing:
        return None
    kept_parts, num_kept = [], 0
    for span in closing:
        first = first_needed(ratio, span.start)
        kept_parts.append((span.request, range(first, span.start), num_kept))
        num_kept += span.start - first
    indices, requests, entries = [], [], []
    for span, (_, kept, kept_at) in zip(closing, kept_parts):
        entry_X = np.arange(span.start // ratio, span.end // ratio)
        position_XR = tokens_of(ratio, entry_X)
        in_tail, in_rows = kept_at + position_XR - kept.start, num_kept + span.rows.start + position_XR - span.start
        index_XR = np.where(position_XR < span.start, in_tail, in_rows)
        indices.append(np.where(position_XR < 0, -1, index_XR))
        requests.append(np.full(len(entry_X), span.request))
        entries.append(entry_X)
    return ClosedEntries(Places.join(kept_parts), *(_joined(each) for each in (indices, requests, entries)))


def _joined(parts: Sequence[np.ndarray]) -> Tensor:
    return torch.from_numpy(np.concatenate(parts) if parts else np.empty(0, np.int64))


def _pages(move: TailMove) -> Tensor:
    return torch.tensor(move.pages, dtype=torch.int64)
