"""HybridPlan: where a batch's tokens go in the hybrid cache and what is read of it, worked out once for all layers.

It is made on the host, from what the host knows of the batch, and its numbers are copied to the device as layers ask
for them: nothing waits for a GPU. Requests are inserted in groups, in order: a group reads what its requests left in
earlier steps, then writes. Only a request that begins with a bookmark which another request of the same batch leaves
has to wait for a later group.

T tokens, B requests, F tail pages. Y positions that are read or written. N moves. Knows nothing of what is computed.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from eprt.gpu.upload import upload
from eprt.layers.batch import ForwardBatch
from eprt.layers.compressor import first_needed, tokens_of
from eprt.layers.hybrid_cache import MovePlaces, Ring

CPU = torch.device("cpu")


@dataclass(frozen=True)
class RequestSpan:
    """One request's part of a batch."""

    request: int  # of the batch, whose pages hold them
    rows: slice
    start: int  # position of the first row
    end: int  # behind the last
    tail: tuple[int, ...]  # pages
    takeover: tuple[int, ...] | None  # pages of the bookmark that the request begins with
    bookmarks: tuple[tuple[int, tuple[int, ...]], ...]  # (end, pages) that it leaves

    def row_of(self, position: int) -> int:
        return self.rows.start + position - self.start


@dataclass(frozen=True)
class Places:
    """Some positions of requests, and where their values are or go in another tensor. int64 [Y]."""

    request_Y: Tensor
    position_Y: Tensor
    at_Y: Tensor
    _slots: dict[int, Tensor] = field(default_factory=dict, init=False)

    @staticmethod
    def join(parts: Sequence[tuple[int, range, int]], device: torch.device = CPU) -> "Places":
        """Of (request, positions, where the first one is)."""
        columns = [(request, each.start, first, len(each)) for request, each, first in parts]
        request_N, start_N, first_N, length_N = np.array(columns, np.int64).reshape(-1, 4).T
        within_Y = np.arange(length_N.sum()) - np.repeat(length_N.cumsum() - length_N, length_N)
        position_Y, at_Y = (np.repeat(each, length_N) + within_Y for each in (start_N, first_N))
        return Places(*upload([np.repeat(request_N, length_N), position_Y, at_Y], device))

    def slots(self, tail_BF: Tensor, ring: Ring) -> Tensor:
        """int64 [Y], of a ring. Rings of one size share the work."""
        if ring.size not in self._slots:
            slot_FY = tail_BF.T[:, self.request_Y] * ring.size + self.position_Y % ring.size
            self._slots[ring.size] = slot_FY
        return self._slots[ring.size][ring.page]

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
    marked_N: Tensor  # int64: those at whose ends bookmarks are left, in the order of SpanGroup.bookmarks; of ratio 4
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
    takeovers: MovePlaces | None  # bookmarks that become tails
    bookmarks: MovePlaces | None  # that are left
    marked_NW: Tensor | None  # int64: of each of these the local rows of the window
    _writes: dict[int, Places] = field(default_factory=dict)
    _closed: dict[int, ClosedEntries | None] = field(default_factory=dict)

    def writes(self, size: int) -> Places:
        """What rings of this size keep of each request's rows."""
        if size not in self._writes:
            kept = ((span, max(span.start, span.end - size)) for span in self.spans)
            parts = [(span.request, range(first, span.end), span.row_of(first)) for span, first in kept]
            self._writes[size] = Places.join(parts, self._device)
        return self._writes[size]

    def closed(self, ratio: int) -> ClosedEntries | None:
        if ratio not in self._closed:
            self._closed[ratio] = _closed_entries(self.spans, ratio, self._device)
        return self._closed[ratio]

    @property
    def _device(self) -> torch.device:
        return self.before.at_Y.device


class HybridPlan:
    """window: tokens that a query sees, with itself."""

    def __init__(self, batch: ForwardBatch, window: int):
        assert batch.tail_BF is not None, "a model with a hybrid cache needs each request's tail pages"
        self.device = device = batch.tail_BF.device
        self.tail_BF, self.table_BP = batch.tail_BF.long(), batch.page_table_BP.long()
        self.spans = list(read_spans(batch))
        self.longest = max((span.end for span in self.spans), default=0)
        self.groups: list[SpanGroup] = []
        rows, num_local = [], 0
        for spans in _in_groups(self.spans):
            before, first_of = [], []
            for span in spans:
                first = max(0, span.start - window + 1)
                before.append((span.request, range(first, span.start), num_local))
                rows.append((span.request, range(span.start, span.end), num_local + span.start - first))
                first_of.append(num_local - first)  # where the request's position 0 would be
                num_local += span.end - first
            self.groups.append(_group(spans, before, first_of, window, device))
        of_rows = Places.join(rows, device)
        self.num_local = num_local  # rows of windows before requests and of the batch's tokens, side by side
        self.local_T, self.request_T = of_rows.at_Y, of_rows.request_Y.int()
        self.position_T = of_rows.position_Y
        self.local_begin_T = self.local_T - self.position_T.clamp(max=window - 1)
        self.local_end_T = self.local_T + 1


def _group(
    spans: list[RequestSpan],
    before: Sequence[tuple[int, range, int]],
    first_of: list[int],
    window: int,
    device: torch.device,
) -> SpanGroup:
    """first_of: of each request, where among the local rows its position 0 would be."""
    takeovers = [(span.tail, span.takeover, span.start) for span in spans if span.takeover is not None]
    bookmarks = [(span.tail, pages, end) for span in spans for end, pages in span.bookmarks]
    marked = [first + end for first, span in zip(first_of, spans) for end, _ in span.bookmarks]
    marked_NW = None
    if marked:
        (marked_NW,) = upload([np.array(marked)[:, None] + np.arange(-window, 0)], device)
    taken, left = (MovePlaces.upload(each, device) if each else None for each in (takeovers, bookmarks))
    return SpanGroup(spans, Places.join(before, device), taken, left, marked_NW)


def read_spans(batch: ForwardBatch) -> Iterator[RequestSpan]:
    """The requests of a batch, in order. Tokens of one request that follow each other as requests of their own, as
    drafts do, are put together: the later ones see the earlier."""
    host = batch.on_host()
    starts, lengths, tails = (each.tolist() for each in (host.query_start_B1, host.seq_len_B, host.tail_BF))
    takeovers = {move.request: move.pages for move in batch.takeovers}
    first = 0
    for b, end in enumerate(lengths):
        next_start = None if b + 1 == len(lengths) else lengths[b + 1] - (starts[b + 2] - starts[b + 1])
        if next_start == end and tails[b + 1] == tails[b]:
            continue
        rows = slice(starts[first], starts[b + 1])
        bookmarks = tuple((move.end, move.pages) for move in batch.bookmarks if first <= move.request <= b)
        begin = end - (rows.stop - rows.start)
        yield RequestSpan(b, rows, begin, end, tuple(tails[b]), takeovers.get(first), bookmarks)
        first = b + 1


def _in_groups(spans: list[RequestSpan]) -> list[list[RequestSpan]]:
    groups: list[list[RequestSpan]] = [[]]
    left: set[int] = set()  # pages of bookmarks that the group leaves
    for span in spans:
        if span.takeover is not None and left.intersection(span.takeover):
            groups.append([])
            left.clear()
        groups[-1].append(span)
        left.update(page for _, pages in span.bookmarks for page in pages)
    return groups


def _closed_entries(spans: list[RequestSpan], ratio: int, device: torch.device) -> ClosedEntries | None:
    closing = [span for span in spans if span.end // ratio > span.start // ratio]
    if not closing:
        return None
    kept_parts, num_kept = [], 0
    for span in closing:
        first = first_needed(ratio, span.start)
        kept_parts.append((span.request, range(first, span.start), num_kept))
        num_kept += span.start - first
    indices, requests, entries, marked, num = [], [], [], [], 0
    for span, (_, kept, kept_at) in zip(closing, kept_parts):
        entry_X = np.arange(span.start // ratio, span.end // ratio)
        position_XR = tokens_of(ratio, entry_X)
        in_tail, in_rows = kept_at + position_XR - kept.start, num_kept + span.rows.start + position_XR - span.start
        index_XR = np.where(position_XR < span.start, in_tail, in_rows)
        indices.append(np.where(position_XR < 0, -1, index_XR))
        requests.append(np.full(len(entry_X), span.request))
        entries.append(entry_X)
        marked += [num + end // ratio - 1 - span.start // ratio for end, _ in span.bookmarks]
        num += len(entry_X)
    columns = [*(np.concatenate(each) for each in (indices, requests, entries)), np.array(marked, np.int64)]
    return ClosedEntries(Places.join(kept_parts, device), *upload(columns, device))
