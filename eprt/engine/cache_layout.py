"""CacheLayout: what a page of the KV cache holds, how large it is, and what a request needs beyond the pages of its
tokens. One layout for latents (V2, V3, V3.2), one for V4's five kinds of entries; the allocator knows neither.
"""

import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from eprt.config import EngineConfig, ModelConfig
from eprt.engine.cache_format import CacheFormat
from eprt.engine.team_pages import TeamPages
from eprt.ep.group.group import EPGroup
from eprt.kv.pages import CachePages
from eprt.kv.readable_cache import ReadableCache
from eprt.layers.hybrid_cache import PAGE_TOKENS, HybridLayout
from eprt.layers.layer_cache import LayerCache
from eprt.ops.index_format import IndexFormat
from eprt.ops.kv_format import KVFormat


class CacheLayout:
    page_size: int  # tokens
    page_bytes: int  # of all layers
    token_bytes: float  # that each further token takes, in all layers
    num_tail: int = 0  # pages that a request has besides those of its tokens
    num_bookmark: int = 0  # pages that continue a prefix, where those of its tokens do not suffice

    @staticmethod
    def for_model(config: EngineConfig, model: ModelConfig, kv_dtype: torch.dtype) -> "CacheLayout":
        """ValueError for a format that the model cannot have. An MTP layer is the last one of the layers."""
        drafts = config.num_speculative_tokens
        if config.prompt_ranks > 1 and (model.v4 is not None or model.indexer is not None):
            model_name = "V4" if model.v4 is not None else "V3.2, whose attention has an indexer"
            raise ValueError(
                f"--prompt-ranks {config.prompt_ranks}: one prompt over several ranks works with DeepSeek V2 and V3 so "
                f"far, not with {model_name}; leave it out"
            )
        if model.v4 is None:
            if config.index_cache_dtype != "auto":
                raise ValueError(
                    f"--index-cache-dtype {config.index_cache_dtype}: only DeepSeek V4's indexer has such a cache; "
                    "leave it out"
                )
            entry = CacheFormat.from_name(config.kv_cache_dtype, model, kv_dtype)
            return LatentLayout(model.num_hidden_layers + (drafts > 0), config.page_size, entry)
        if config.hands_over and config.device != "cpu":
            raise ValueError(
                f"--device {config.device}: requests of DeepSeek V4 go from instance to instance on CPUs only so far; "
                "leave out --prefill and --decode, or use --device cpu"
            )
        ratios = (*model.v4.compress_ratios, *[0] * (drafts > 0))
        dtype = {"auto": kv_dtype, "bf16": torch.bfloat16, "fp8": torch.uint8}[config.kv_cache_dtype]
        return HybridCacheLayout(HybridLayout.for_model(model, ratios, dtype, config.index_cache_dtype, drafts))

    def allocate(self, num_pages: int, device: torch.device, readable: ReadableCache | None = None) -> Sequence[Any]:
        """Each layer's part of the pages. MemoryError where the device has no room for them. readable: gets them as its
        parts."""
        raise NotImplementedError

    def allocate_together(
        self, num_pages: int, group: EPGroup, device: torch.device, readable: CachePages | None = None
    ) -> TeamPages:
        """The same in memory that all ranks have. Collective."""
        raise NotImplementedError


@dataclass(frozen=True)
class LatentLayout(CacheLayout):
    """Every layer keeps the same of each token."""

    num_layers: int
    page_size: int
    entry: CacheFormat

    @property
    def token_bytes(self) -> int:
        return self.num_layers * self.entry.token_bytes

    @property
    def page_bytes(self) -> int:
        return self.page_size * self.token_bytes

    def allocate(self, num_pages: int, device: torch.device, readable: ReadableCache | None = None) -> list[LayerCache]:
        shape = self.num_layers, num_pages, self.page_size
        latents = allocate_kv_cache(*shape, self.entry.latent, device, readable)
        if self.entry.index is None:
            return [LayerCache(latents_PSD) for latents_PSD in latents]
        index_keys = allocate_kv_cache(*shape, self.entry.index, device, readable)
        return [LayerCache(*pages) for pages in zip(latents, index_keys)]

    def allocate_together(
        self, num_pages: int, group: EPGroup, device: torch.device, readable: CachePages | None = None
    ) -> TeamPages:
        make = TeamPages.on_gpus if device.type == "cuda" else TeamPages.on_cpus
        return make(self.num_layers, num_pages, self.page_size, self.entry.latent, group, readable)


class HybridCacheLayout(CacheLayout):
    """As hybrid_cache.py says; all layers share one piece of memory."""

    page_size = PAGE_TOKENS

    def __init__(self, hybrid: HybridLayout):
        self.hybrid = hybrid
        self.page_bytes, self.token_bytes = hybrid.page_bytes, hybrid.bytes_per_token
        self.num_tail, self.num_bookmark = hybrid.tail.num_pages, hybrid.bookmark.num_pages

    def allocate(self, num_pages: int, device: torch.device, readable: ReadableCache | None = None) -> Sequence[Any]:
        memory_LPB = _zeros((1, num_pages, self.page_bytes), torch.uint8, device, readable)  # one piece for all layers
        return self.hybrid.layers(memory_LPB[0])


def allocate_kv_cache(
    num_layers: int,
    num_pages: int,
    page_size: int,
    entry: KVFormat | IndexFormat,
    device: torch.device | str,
    readable: ReadableCache | None = None,
) -> Tensor:
    """Pages [layers, pages, page_size, entry.width], zeroed, so that unused entries are finite numbers.
    MemoryError where the device has no room for it. readable: gets it as a further part."""
    return _zeros((num_layers, num_pages, page_size, entry.width), entry.dtype, device, readable)


def _zeros(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str, readable: ReadableCache | None = None
) -> Tensor:
    num_bytes = torch.Size(shape).numel() * dtype.itemsize
    try:
        if readable is not None:
            return readable.allocate_part(shape, dtype)
        if torch.device(device).type == "cpu":  # pages take memory only once they are written
            memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(shape)
        return torch.zeros(shape, dtype=dtype, device=device)
    except (RuntimeError, OSError, OverflowError) as error:  # torch's message fills a page and names no option
        raise MemoryError(
            f"the KV cache takes {num_bytes / 2**30:.1f} GB (2**30 bytes), for which {device} has no room left: lower "
            f"--kv-cache-gb ({str(error).splitlines()[0]})"
        ) from None
