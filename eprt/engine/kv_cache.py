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

Requests release their pages last page first, so that the ends of chains are evicted before their beginnings. A page
whose beginning was evicted first after all (it followed another request's copy) is never found, and evicted in turn.
"""

import logging
import mmap
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from eprt.config import EngineConfig, ModelConfig
from eprt.engine.cache_format import CacheFormat
from eprt.kv.pages import CachePages
from eprt.layers.layer_cache import LayerCache
from eprt.models.model import Model
from eprt.ops.index_format import IndexFormat
from eprt.ops.kv_format import KVFormat

_log = logging.getLogger(__name__)

ROOT_NODE = 0
# Pages beyond this many times what the running requests can fill would only hold prefixes that nobody asks for again.
_USEFUL_CACHE = 4


class PagePool:
    """Accounts for num_pages pages of page_size tokens. Holds no tensor.

    num_next: how many tokens behind a page its entries depend on; they are then part of its key.
    """

    def __init__(self, num_pages: int, page_size: int, enable_prefix_cache: bool = True, num_next: int = 0):
        if num_pages < 1:
            raise ValueError(f"the KV cache has {num_pages} pages; it needs at least 1 (raise --kv-cache-gb)")
        self.num_pages, self.page_size = num_pages, page_size
        self.enable_prefix_cache, self.num_next = enable_prefix_cache, num_next
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

    def match_prefix(self, tokens_L: np.ndarray, max_tokens: int) -> tuple[list[int], int]:
        """The longest known chain of full pages covering at most max_tokens of tokens_L (int32), and its last node.
        num_next more tokens must follow. Takes no ownership: acquire() does."""
        pages: list[int] = []
        node, size = ROOT_NODE, self.page_size
        for end in range(size, max_tokens + 1, size):
            entry = self._entry_of.get((node, tokens_L[end - size : end + self.num_next].tobytes()))
            if entry is None:
                break
            page, node = entry
            pages.append(page)
        return pages, node

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


@dataclass(frozen=True, eq=False)
class KVCache:
    """One rank's pages: their accounts and their memory."""

    pool: PagePool
    # An MTP layer is the last one. The last page of each is for padding: the pool does not know it.
    layers: Sequence[LayerCache]
    max_model_len: int  # most tokens of a request
    pages: CachePages | None = None  # the same memory, where others may read it (EngineConfig.hands_over)

    @property
    def num_tokens(self) -> int:
        """Tokens for which the pages have room."""
        return self.pool.num_pages * self.pool.page_size

    @staticmethod
    def for_model(config: EngineConfig, model: Model, left_bytes: int) -> "KVCache":
        """model: loaded. left_bytes: for the cache, where --kv-cache-gb does not say how much. ValueError naming the
        option that does not fit, MemoryError where there is no room."""
        size = CacheSize.for_config(config, model.config, model.kv_dtype, left_bytes)
        if size.note:
            _log.warning(size.note)
        # An MTP layer's entries depend on each token and the next.
        drafts = config.num_speculative_tokens > 0
        pool = PagePool(size.num_pages, config.page_size, config.enable_prefix_cache, num_next=int(drafts))
        pages = CachePages() if config.hands_over else None
        layers = allocate_layers(size, model.device, pages)
        if pages is not None and pages.num_bytes != size.num_bytes:
            raise ValueError("requests of this model cannot be handed to another instance: its cache is not all pages")
        return KVCache(pool, layers, min(size.max_model_len, size.num_tokens), pages)


@dataclass(frozen=True)
class CacheSize:
    """How many pages a rank has, known before they are there, and what decided it."""

    num_layers: int  # an MTP layer is the last
    num_pages: int  # without the one for padding
    page_size: int  # tokens
    entry: CacheFormat
    max_model_len: int  # as asked for
    note: str  # what is other than asked for, "" for nothing

    @property
    def num_tokens(self) -> int:
        return self.num_pages * self.page_size

    @property
    def num_bytes(self) -> int:
        """Of all tensors."""
        return (self.num_pages + 1) * self.page_size * self.token_bytes

    @property
    def token_bytes(self) -> int:
        """Of a token in all layers."""
        return self.num_layers * self.entry.token_bytes

    @staticmethod
    def for_config(config: EngineConfig, model: ModelConfig, kv_dtype: torch.dtype, left_bytes: int) -> "CacheSize":
        """left_bytes: see KVCache.for_model."""
        most, drafts, page_size = model.max_position_embeddings, config.num_speculative_tokens > 0, config.page_size
        max_model_len = config.max_model_len or most
        if max_model_len > most:
            raise ValueError(f"--max-model-len {max_model_len}: the model knows positions up to {most}")
        entry = CacheFormat.from_name(config.kv_cache_dtype, model, kv_dtype)
        num_layers, given_gb = model.num_hidden_layers + drafts, config.kv_cache_gb
        if given_gb is None and left_bytes <= 0:
            raise ValueError(
                f"no memory is left for a KV cache: weights and buffers take {-left_bytes / 2**30:.2f} GB more than "
                "--memory-fraction allows a rank; raise it, take more ranks on more hosts, or give --kv-cache-gb"
            )
        gb = left_bytes / 2**30 if given_gb is None else given_gb
        useful = _USEFUL_CACHE * config.max_num_seqs * -(-max_model_len // page_size)
        num_pages = num_kv_pages(gb, page_size, num_layers * entry.token_bytes, useful)
        size = CacheSize(num_layers, num_pages, page_size, entry, max_model_len, "")
        return replace(size, note=_note(size, given_gb, gb, num_pages == useful, config.max_num_seqs))


def _note(size: CacheSize, given_gb: float | None, gb: float, is_bounded: bool, max_num_seqs: int) -> str:
    if size.num_tokens < size.max_model_len:
        how = f"--memory-fraction leaves {gb:.2f} GB" if given_gb is None else f"--kv-cache-gb {given_gb}"
        return (
            f"the KV cache holds {size.num_tokens} tokens per rank: requests are limited to that instead of "
            f"{size.max_model_len} ({how})"
        )
    if given_gb is None or not is_bounded or size.num_bytes > 0.9 * gb * 2**30:
        return ""
    return (
        f"the KV cache takes {size.num_bytes / 2**30:.2f} GB of --kv-cache-gb {given_gb}: it holds {_USEFUL_CACHE} "
        f"times what --max-num-seqs {max_num_seqs} requests of {size.max_model_len} tokens need; more would not be used"
    )


def num_kv_pages(kv_cache_gb: float, page_size: int, token_bytes: int, num_useful: int) -> int:
    """Pages that fit in kv_cache_gb * 2**30 bytes, but no more than num_useful. Raises if none fits. token_bytes: of
    all layers."""
    page_bytes = page_size * token_bytes
    fit = int(kv_cache_gb * 2**30) // page_bytes
    if fit < 1:
        raise ValueError(f"--kv-cache-gb {kv_cache_gb}: one page of {page_size} tokens takes {page_bytes} bytes")
    return min(fit, num_useful)


def allocate_layers(size: CacheSize, device: torch.device, readable: CachePages | None = None) -> list[LayerCache]:
    """MemoryError where the device has no room for them. readable: gets them as its parts."""
    shape = size.num_layers, size.num_pages + 1, size.page_size
    latents = allocate_kv_cache(*shape, size.entry.latent, device, readable)
    if size.entry.index is None:
        return [LayerCache(latents_PSD) for latents_PSD in latents]
    index_keys = allocate_kv_cache(*shape, size.entry.index, device, readable)
    return [LayerCache(*pages) for pages in zip(latents, index_keys)]


def allocate_kv_cache(
    num_layers: int,
    num_pages: int,
    page_size: int,
    entry: KVFormat | IndexFormat,
    device: torch.device | str,
    readable: CachePages | None = None,
) -> Tensor:
    """Pages [layers, pages, page_size, entry.width], zeroed, so that unused entries are finite numbers.
    MemoryError where the device has no room for it. readable: gets a CPU's as a further part."""
    shape = (num_layers, num_pages, page_size, entry.width)
    num_bytes = torch.Size(shape).numel() * entry.dtype.itemsize
    try:
        if readable is not None and torch.device(device).type == "cpu":
            return readable.allocate_part(shape, entry.dtype)
        if torch.device(device).type == "cpu":  # pages take memory only once they are written
            memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            return torch.frombuffer(memory, dtype=torch.uint8).view(entry.dtype).view(shape)
        return torch.zeros(shape, dtype=entry.dtype, device=device)
    except (RuntimeError, OSError, OverflowError) as error:  # torch's message fills a page and names no option
        raise MemoryError(
            f"the KV cache takes {num_bytes / 2**30:.1f} GB (2**30 bytes), for which {device} has no room left: lower "
            f"--kv-cache-gb ({str(error).splitlines()[0]})"
        ) from None
