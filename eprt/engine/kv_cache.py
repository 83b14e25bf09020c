"""The paged KV cache of one rank: the tensor, and who owns which page.

A page holds the cache entries of page_size consecutive tokens, for all layers. Every page is in exactly one state:

    free      nobody needs its content
    cached    full, known to the prefix cache, no owner: reusable by a prompt with this prefix, or evicted, oldest first
    owned     by one or more running requests (reference count); only full pages are ever shared, so nothing is copied

Prefix reuse. A full page is known by the pair (node of the page before it, its token ids); the dictionary over these
pairs hashes the chain and compares the token ids themselves. A node is a number given to one prefix and never to
another, so equal pairs mean equal prefixes: no hash collision can serve a wrong page. When two requests compute the
same page at once, the first one's is known and the other's stays private; both continue under the same node. Where
entries also depend on the token that follows theirs (an MTP layer's do) the key of a page includes the token behind it.

Bookmarks. Where a request has more than its page entries (its tail: layers/hybrid_cache.py), a prefix can be gone on
from only where a request has left a bookmark: pages of their own, known under the prefix's node. They are owned while a
step writes or reads them, else cached or free like others.

Requests release their pages last page first, so that the ends of chains are evicted before their beginnings. A page
whose beginning was evicted first after all (it followed another request's copy) is never found, and evicted in turn.
"""

import logging
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from eprt.config import EngineConfig
from eprt.engine.cache_size import CacheSize
from eprt.engine.team_pages import TeamPages, agreed_pages
from eprt.ep.group.group import EPGroup
from eprt.kv.pages import CachePages
from eprt.kv.readable_cache import ReadableCache
from eprt.models.model import Model

_log = logging.getLogger(__name__)

ROOT_NODE = 0


class PagePool:
    """Accounts for num_pages pages of page_size tokens. Holds no tensor.

    num_next: how many tokens behind a page its entries depend on; they are then part of its key.
    num_tail: pages that each request has besides those of its tokens.
    num_bookmark: pages of a bookmark, without which no prefix can be gone on from; 0 where pages are all there is.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        enable_prefix_cache: bool = True,
        num_next: int = 0,
        *,
        num_tail: int = 0,
        num_bookmark: int = 0,
    ):
        if num_pages < 1:
            raise ValueError(f"the KV cache has {num_pages} pages; it needs at least 1 (raise --kv-cache-gb)")
        self.num_pages, self.page_size = num_pages, page_size
        self.enable_prefix_cache, self.num_next = enable_prefix_cache, num_next
        self.num_tail, self.num_bookmark = num_tail, num_bookmark
        self.num_releases = 0  # grows whenever pages may have become available
        self._free = list(range(num_pages - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._refs = [0] * num_pages  # owners of each page
        self._key_of: list[tuple[int, bytes] | None] = [None] * num_pages  # None: the prefix cache does not know it
        self._entry_of: dict[tuple[int, bytes], tuple[int, int]] = {}  # key -> (page, node)
        self._next_node = ROOT_NODE + 1

    @property
    def num_available(self) -> int:
        """Pages that allocate() could hand out now."""
        return len(self._free) + len(self._cached)

    @property
    def num_owned(self) -> int:
        return self.num_pages - self.num_available

    def match_prefix(self, tokens_L: np.ndarray, max_tokens: int, has_tail: bool = False) -> tuple[list[int], int]:
        """The longest known chain of full pages, covering at most max_tokens of tokens_L (int32), that a request can go
        on from, and its last node. num_next more tokens must follow. has_tail: the request needs no bookmark. Takes no
        ownership: acquire() does."""
        pages: list[int] = []
        nodes, size = [ROOT_NODE], self.page_size
        node = ROOT_NODE
        for end in range(size, max_tokens + 1, size):
            entry = self._entry_of.get((node, tokens_L[end - size : end + self.num_next].tobytes()))
            if entry is None:
                break
            page, node = entry
            pages.append(page)
            nodes.append(node)
        while pages and not has_tail and len(self.find_bookmark(nodes[-1])) < self.num_bookmark:
            pages.pop()
            nodes.pop()
        return pages, nodes[-1]

    def find_bookmark(self, node: int) -> list[int]:
        """The pages of the bookmark behind this prefix, as far as they are there."""
        entries = (self._entry_of.get((node, _bookmark_key(i))) for i in range(self.num_bookmark))
        return [entry[0] for entry in entries if entry is not None]

    def register_bookmark(self, node: int, pages: Sequence[int]) -> None:
        """Makes a bookmark's pages known; those whose like is known already stay private."""
        for i, page in enumerate(pages):
            key = node, _bookmark_key(i)
            if key not in self._entry_of:
                self._entry_of[key] = (page, node)
                self._key_of[page] = key

    def num_needed(self, num_tokens: int) -> int:
        """Pages of a request with so many tokens."""
        return -(-num_tokens // self.page_size) + self.num_tail

    def num_cached(self, pages: Iterable[int]) -> int:
        """How many of these known pages have no owner, and so count as available."""
        return sum(self._refs[page] == 0 for page in pages)

    def acquire(self, pages: Iterable[int]) -> None:
        """Adds one owner to each of these known pages."""
        for page in pages:
            if self._refs[page] == 0:
                del self._cached[page]
            self._refs[page] += 1

    def allocate(self) -> int:
        """A page with one owner, evicting the least recently used cached page if none is free. Needs num_available."""
        if self._free:
            page = self._free.pop()
        else:
            page, _ = self._cached.popitem(last=False)
            self._forget(page)
        self._refs[page] = 1
        return page

    def register(self, page: int, parent_node: int, tokens: np.ndarray) -> int:
        """Makes a full page known by its tokens and the num_next that follow (int32), after prefix parent_node.
        Returns the longer prefix's node."""
        if not self.enable_prefix_cache:
            return ROOT_NODE
        key = (parent_node, tokens.tobytes())
        entry = self._entry_of.get(key)
        if entry is not None:
            return entry[1]
        node, self._next_node = self._next_node, self._next_node + 1
        self._entry_of[key] = (page, node)
        self._key_of[page] = key
        return node

    def forget(self, page: int) -> None:
        """The page, which has an owner, does not hold what it is known for: no prompt finds it any more."""
        if self._key_of[page] is not None:
            self._forget(page)

    def forget_cached(self) -> None:
        """Of pages without an owner nothing is known any more."""
        for page in self._cached:
            self._forget(page)
            self._free.append(page)
        self._cached.clear()

    def release(self, pages: Sequence[int]) -> None:
        """Removes one owner from each page of a request. Known pages stay cached, the others become free."""
        self.num_releases += 1
        for page in reversed(pages):
            self._refs[page] -= 1
            if self._refs[page] == 0:
                if self._key_of[page] is None:
                    self._free.append(page)
                else:
                    self._cached[page] = None

    def _forget(self, page: int) -> None:
        key = self._key_of[page]
        assert key is not None, f"page {page} has no key"
        del self._entry_of[key]
        self._key_of[page] = None

    def check_integrity(self, owned: Iterable[Sequence[int]]) -> None:
        """Raises RuntimeError naming the first page that is not exactly free, cached, or in `owned`, the page lists of
        all running requests."""
        owners = Counter(page for pages in owned for page in pages)
        for page, count in Counter(self._free).items():
            if count > 1:
                raise RuntimeError(f"KV page {page} is on the free list twice")
        free = set(self._free)
        for page in range(self.num_pages):
            states = (page in free) + (page in self._cached) + (owners[page] > 0)
            if states != 1 or self._refs[page] != owners[page]:
                raise RuntimeError(
                    f"KV page {page}: free {page in free}, cached {page in self._cached}, {owners[page]} owners among "
                    f"the running requests, reference count {self._refs[page]}; it must be in exactly one state"
                )
            key = self._key_of[page]
            if key is not None and self._entry_of.get(key, (-1, -1))[0] != page:
                raise RuntimeError(f"KV page {page} holds a known prefix that leads to page {self._entry_of.get(key)}")
            if key is None and page in self._cached:
                raise RuntimeError(f"KV page {page} is cached but no prefix leads to it")
        if len(self._entry_of) != sum(key is not None for key in self._key_of):
            raise RuntimeError(f"{len(self._entry_of)} prefixes are known, but fewer pages hold them")


def _bookmark_key(i: int) -> bytes:
    """Of a bookmark's i-th page: shorter than the tokens of any page."""
    return bytes([i])


@dataclass(frozen=True, eq=False)
class KVCache:
    """One rank's pages: their accounts and their memory."""

    pool: PagePool
    # An MTP layer is the last one. The last page of each is for padding: the pool does not know it.
    layers: Sequence[Any]  # each a LayerCache, or what else the model's attention keeps
    max_model_len: int  # most tokens of a request
    token_bytes: float  # that each further token of a request takes
    pages: ReadableCache | None = None  # the same memory, where others may read it (EngineConfig.hands_over)
    team_pages: TeamPages | None = None  # where the layers have other ranks' pages too

    @property
    def first_page(self) -> int:
        """Number of the pool's page 0 in the layers."""
        return 0 if self.team_pages is None else self.team_pages.first_page

    @property
    def num_tokens(self) -> int:
        """Tokens for which the pages have room, all of one request."""
        return (self.pool.num_pages - self.pool.num_tail) * self.pool.page_size

    @staticmethod
    def for_model(config: EngineConfig, group: EPGroup, model: Model, left_bytes: int) -> "KVCache":
        """model: loaded. left_bytes: for the cache, where --kv-cache-gb does not say how much. ValueError naming the
        option that does not fit, MemoryError where there is no room. Collective with teams of
        ranks (--prompt-ranks, --attention-tp)."""
        size = CacheSize.for_config(config, model.config, model.kv_dtype, left_bytes)
        if size.note:
            _log.warning(size.note)
        # An MTP layer's entries depend on each token and the next.
        drafts = config.num_speculative_tokens > 0
        together = min(max(config.prompt_ranks, config.attention_tp), group.size) > 1
        if together:
            size = replace(size, num_pages=agreed_pages(group, size.num_pages))
        layout, sizes = size.layout, (size.num_pages, size.layout.page_size)
        extra = {"num_tail": layout.num_tail, "num_bookmark": layout.num_bookmark}
        pool = PagePool(*sizes, config.enable_prefix_cache, num_next=int(drafts), **extra)
        pages = _readable_cache(model.device) if config.hands_over else None
        team_pages = None
        if together:
            assert pages is None or isinstance(pages, CachePages), "EngineConfig refuses it"
            team_pages = layout.allocate_together(size.num_pages + 1, group, model.device, pages)
        layers = layout.allocate(size.num_pages + 1, model.device, pages) if team_pages is None else team_pages.layers
        if pages is not None and pages.num_bytes != size.num_bytes:
            raise ValueError("requests of this model cannot be handed to another instance: nobody can read its cache")
        longest = min(size.max_model_len, size.num_tokens)
        return KVCache(pool, layers, longest, layout.token_bytes, pages, team_pages)


def _readable_cache(device: torch.device) -> ReadableCache:
    if device.type == "cpu":
        return CachePages()
    from eprt.kv.gpu_pages import GpuPages

    return GpuPages(device)
