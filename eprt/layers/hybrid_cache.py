"""The cache of DeepSeek-V4's attention: five kinds of entries, in pages of one size from one pool.

A request has pages of three kinds, each laid out layer by layer:

    context   one for every 256 positions: the compressed entries that windows closed there have left, 64 in a layer of
              ratio 4 (and 64 keys of its indexer), 2 in a layer of ratio 128
    tail      as many as a request needs, once: of each layer the latest entries of the window, and what its compressors
              know of tokens whose entries are not complete; rings, by position
    bookmark   what a request needs to go on behind a multiple of 256 positions: of each layer the window before it and,
              of ratio 4, the last four tokens' share in the next entry. Ratio 128 has nothing open there. It is written
              when the position is passed, and another request that begins with the same tokens goes on from it

So a request's memory beyond its context pages does not grow, and nothing behind a window is kept but bookmarks, which
the prefix cache drops when pages are needed. A page has the size of a context page; tail and bookmark take as many
as their pieces need. Layers of ratio 0 (MTP layers among them) have windows alone.

Knows nothing of requests, of who owns pages, or of how entries are computed.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from eprt import ops
from eprt.config import ModelConfig
from eprt.gpu.upload import upload
from eprt.layers.compressor import OVERLAPPING_RATIO
from eprt.ops.entry_format import EntryFormat
from eprt.ops.index_format import IndexFormat

PAGE_TOKENS = 256  # positions of a context page
_ALIGNMENT = 64  # bytes

Shape = tuple[int, ...]


@dataclass(frozen=True)
class PagePiece:
    """Slots of one layer in the pages of one kind."""

    name: str
    shape: Shape  # slots, then the values of each
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    @property
    def stored_bytes(self) -> int:
        return -(-self.num_bytes // _ALIGNMENT) * _ALIGNMENT


@dataclass(frozen=True)
class PiecePlace:
    """Where a piece is."""

    page: int  # which of the kind's pages of a request
    offset: int  # bytes in that page


class KindLayout:
    """The pieces of all layers in the pages of one kind. page_bytes: 0 for one page as large as it must be."""

    def __init__(self, pieces_L: Sequence[Sequence[PagePiece]], page_bytes: int = 0):
        self.pieces_L, self.place_of = pieces_L, dict[tuple[int, str], PiecePlace]()
        self.used_bytes = sum(piece.num_bytes for pieces in pieces_L for piece in pieces)
        free: list[int] = []  # bytes left in each page
        limit = page_bytes or sum(piece.stored_bytes for pieces in pieces_L for piece in pieces)
        numbered = [(layer, piece) for layer, pieces in enumerate(pieces_L) for piece in pieces]
        for layer, piece in sorted(numbered, key=lambda each: -each[1].stored_bytes):
            page = next((i for i, left in enumerate(free) if left >= piece.stored_bytes), len(free))
            if page == len(free):
                free.append(limit)
            self.place_of[layer, piece.name] = PiecePlace(page, limit - free[page])
            free[page] -= piece.stored_bytes
        self.num_pages = len(free)
        self.largest_page = limit - min(free, default=limit)  # bytes

    def views(self, memory_PB: Tensor, layer: int) -> Iterator[tuple[str, int, Tensor]]:
        """(name, which page of the kind, [pages, *shape]) of each piece of the layer. memory: uint8."""
        for piece in self.pieces_L[layer]:
            place = self.place_of[layer, piece.name]
            of_pages = memory_PB[:, place.offset : place.offset + piece.num_bytes].view(piece.dtype)
            yield piece.name, place.page, of_pages.unflatten(1, piece.shape)


class Ring:
    """Slots by position, in one of the tail's or bookmark's pages of each request."""

    def __init__(self, page: int, slots_PSD: Tensor):
        self.page, self.size, self.slots_PSD = page, slots_PSD.shape[1], slots_PSD
        self.rows_PSX = slots_PSD.flatten(2)  # the same memory, a slot's values side by side

    def gather(self, slot_Y: Tensor, values: Tensor, at_Y: Tensor | None = None) -> None:
        """Copies slots (page * size + place) to values[at], or to the first of values: [.., slot], of any dtype.
        Negative slots: not copied."""
        if values.dtype == self.rows_PSX.dtype:
            return ops.copy_rows(values.flatten(1), at_Y, self.rows_PSX, slot_Y)
        read_YX = self.rows_PSX.new_empty(len(slot_Y), self.rows_PSX.shape[2])
        ops.copy_rows(read_YX, None, self.rows_PSX, slot_Y)
        values.flatten(1)[slice(len(slot_Y)) if at_Y is None else at_Y] = read_YX.to(values.dtype)

    def scatter(self, slot_Y: Tensor, values: Tensor, at_Y: Tensor | None) -> None:
        """The reverse: from values[at], or from all values in order."""
        ops.copy_rows(self.rows_PSX, slot_Y, values.flatten(1).to(self.rows_PSX.dtype), at_Y)

    def read(self, places: tuple[Tensor, Tensor]) -> Tensor:
        """The slots of (page, place): tensors that go together."""
        return self.slots_PSD[places]

    def write(self, places: tuple[Tensor, Tensor], values: Tensor) -> None:
        """The first channels of these slots become the values, as many as they have."""
        self.slots_PSD[..., : values.shape[-1]][places] = values.to(self.slots_PSD.dtype)


@dataclass(frozen=True)
class MovePlaces:
    """N moves of what continues a context from a position on, between tails and bookmarks. int64."""

    tail_NF: Tensor
    bookmark_NG: Tensor
    end_N: Tensor  # that position, a multiple of PAGE_TOKENS
    _places: dict[tuple[bool, int, int, int], tuple[Tensor, Tensor]] = field(default_factory=dict, init=False)

    @staticmethod
    def upload(moves: Sequence[tuple[Sequence[int], Sequence[int], int]], device: torch.device) -> "MovePlaces":
        """Of (pages of the tail, pages of the bookmark, end)."""
        columns = zip(*moves, strict=True)
        return MovePlaces(*upload([np.array(column, np.int64) for column in columns], device))

    def tail(self, ring: Ring, count: int) -> tuple[Tensor, Tensor]:
        """(page [N, 1], place [N, count]) of the last positions before the ends, in a ring of the tails."""
        return self._at(self.tail_NF, ring, count)

    def bookmark(self, ring: Ring) -> tuple[Tensor, Tensor]:
        """Likewise of a bookmark's ring, which is full."""
        return self._at(self.bookmark_NG, ring, ring.size)

    def _at(self, pages: Tensor, ring: Ring, count: int) -> tuple[Tensor, Tensor]:
        key = pages is self.tail_NF, ring.page, ring.size, count
        if key not in self._places:
            before = torch.arange(-count, 0, device=pages.device)
            place_NS = (self.end_N.unsqueeze(1) + before) % ring.size
            self._places[key] = pages[:, ring.page, None], place_NS
        return self._places[key]


@dataclass(frozen=True, eq=False)
class LayerPages:
    """One layer's part of all pages: P pages, those of any kind."""

    num_pages: int
    ratio: int
    tail: dict[str, Ring]  # "window", "state", "index_state"
    bookmark: dict[str, Ring]  # likewise
    context: dict[str, Tensor]  # "entries" [P, 256 / ratio, width], "keys" likewise
    entry: EntryFormat  # how "window" and "entries" are stored
    index: IndexFormat  # how "keys" are

    @property
    def page_size(self) -> int:
        """Tokens."""
        return PAGE_TOKENS

    @property
    def padding_page(self) -> int:
        """No request's."""
        return self.num_pages - 1

    @property
    def is_cuda(self) -> bool:
        return self.tail["window"].slots_PSD.is_cuda

    def leave_bookmarks(self, moves: MovePlaces) -> None:
        """What requests need to go on behind a multiple of PAGE_TOKENS, which they have passed by a few positions, as
        far as rings go beyond windows."""
        for name, ring in self.bookmark.items():
            tail = self.tail[name]
            values = tail.read(moves.tail(tail, ring.size))
            ring.write(moves.bookmark(ring), values[..., : ring.slots_PSD.shape[-1]])

    def take_over(self, moves: MovePlaces) -> None:
        """The reverse, into the tails of other requests. The other channels are never read."""
        for name, ring in self.bookmark.items():
            tail = self.tail[name]
            tail.write(moves.tail(tail, ring.size), ring.read(moves.bookmark(ring)))


@dataclass(frozen=True)
class HybridLayout:
    """Sizes of everything, from a model's configuration."""

    config: ModelConfig
    ratios: tuple[int, ...]  # of the layers that have a cache; an MTP layer is the last
    entry: EntryFormat  # of windows and entries; what compressors keep is fp32
    index: IndexFormat
    num_drafts: int  # tokens that may have been computed behind the last one that stays

    @staticmethod
    def for_model(
        config: ModelConfig,
        ratios: tuple[int, ...],
        dtype: torch.dtype,
        index_cache: str = "auto",
        num_drafts: int = 0,
    ) -> "HybridLayout":
        """dtype: of entries, torch.uint8 for fp8. index_cache: EngineConfig.index_cache_dtype. ValueError for sizes
        that a format cannot have."""
        assert config.v4 is not None
        entry = EntryFormat(config.v_head_dim, config.qk_rope_head_dim, dtype)
        is_fp4 = index_cache == "fp4"
        index = IndexFormat(config.v4.index_head_dim, torch.uint8 if is_fp4 else dtype, is_fp4)
        return HybridLayout(config, ratios, entry, index, num_drafts)

    @cached_property
    def context(self) -> KindLayout:
        return KindLayout([self._context_pieces(ratio) for ratio in self.ratios])

    @cached_property
    def page_bytes(self) -> int:
        """That of a context page, or of the largest piece where that is larger (models without ratio 4)."""
        pieces = [*self._kind(self._tail_pieces), *self._kind(self._bookmark_pieces)]
        largest = max(piece.stored_bytes for pieces_of_layer in pieces for piece in pieces_of_layer)
        return max(self.context.largest_page, largest)

    @cached_property
    def tail(self) -> KindLayout:
        return KindLayout(self._kind(self._tail_pieces), self.page_bytes)

    @cached_property
    def bookmark(self) -> KindLayout:
        return KindLayout(self._kind(self._bookmark_pieces), self.page_bytes)

    @property
    def bytes_per_token(self) -> float:
        """That a longer context takes; the tail does not grow."""
        return self.context.used_bytes / PAGE_TOKENS

    def layers(self, memory_PB: Tensor) -> list[LayerPages]:
        """Each layer's part of pages [P, page_bytes], uint8."""
        made = []
        for layer, ratio in enumerate(self.ratios):
            tail, bookmark = (
                {name: Ring(page, view) for name, page, view in kind.views(memory_PB, layer)}
                for kind in (self.tail, self.bookmark)
            )
            context = {name: view for name, _, view in self.context.views(memory_PB, layer)}
            made.append(LayerPages(len(memory_PB), ratio, tail, bookmark, context, self.entry, self.index))
        return made

    def _kind(self, pieces_of) -> list[list[PagePiece]]:
        return [list(pieces_of(ratio)) for ratio in self.ratios]

    @property
    def _sizes(self) -> dict[str, int]:
        """Values of an entry, and of an indexer's key."""
        return {"": self.entry.size, "index_": self.index.size}

    def _context_pieces(self, ratio: int) -> list[PagePiece]:
        kinds = {"entries": self.entry, "keys": self.index}
        names = list(kinds)[: 2 if ratio == OVERLAPPING_RATIO else min(ratio, 1)]
        return [PagePiece(name, (PAGE_TOKENS // ratio, kinds[name].width), kinds[name].dtype) for name in names]

    def _window(self, size: int) -> PagePiece:
        return PagePiece("window", (size, self.entry.width), self.entry.dtype)

    def _tail_pieces(self, ratio: int) -> Iterator[PagePiece]:
        assert self.config.v4 is not None
        spare = 2 * self.num_drafts  # positions computed ahead, which later ones overwrite
        yield self._window(self.config.v4.sliding_window + spare)
        if ratio == OVERLAPPING_RATIO:
            for prefix, size in self._sizes.items():
                yield PagePiece(f"{prefix}state", (2 * ratio + spare, 2, 2 * size), torch.float32)
        elif ratio:
            yield PagePiece("state", (ratio + spare, 2, self._sizes[""]), torch.float32)

    def _bookmark_pieces(self, ratio: int) -> Iterator[PagePiece]:
        assert self.config.v4 is not None
        yield self._window(self.config.v4.sliding_window)
        if ratio == OVERLAPPING_RATIO:
            for prefix, size in self._sizes.items():
                yield PagePiece(f"{prefix}state", (ratio, 2, size), torch.float32)
