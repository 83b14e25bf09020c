"""CacheSize: how many pages a rank's KV cache has, known before they are there. Knows nothing of who owns them."""

from dataclasses import dataclass, replace

import torch

from eprt.config import EngineConfig, ModelConfig
from eprt.engine.cache_layout import CacheLayout

# Pages beyond this many times what the running requests can fill would only hold prefixes that nobody asks for again.
_USEFUL_CACHE = 4


@dataclass(frozen=True)
class CacheSize:
    """How many pages a rank has, known before they are there, and what decided it."""

    layout: CacheLayout
    num_pages: int  # without the one for padding
    max_model_len: int  # as asked for
    note: str  # what is other than asked for, "" for nothing

    @property
    def num_tokens(self) -> int:
        """Of the longest request that fits."""
        return (self.num_pages - self.layout.num_tail) * self.layout.page_size

    @property
    def num_bytes(self) -> int:
        """Of all tensors."""
        return (self.num_pages + 1) * self.layout.page_bytes

    @staticmethod
    def for_config(config: EngineConfig, model: ModelConfig, kv_dtype: torch.dtype, left_bytes: int) -> "CacheSize":
        """left_bytes: see KVCache.for_model."""
        most = model.max_position_embeddings
        max_model_len = config.max_model_len or most
        if max_model_len > most:
            raise ValueError(f"--max-model-len {max_model_len}: the model knows positions up to {most}")
        layout, given_gb = CacheLayout.for_model(config, model, kv_dtype), config.kv_cache_gb
        if given_gb is None and left_bytes <= 0:
            raise ValueError(
                f"no memory is left for a KV cache: weights and buffers take {-left_bytes / 2**30:.2f} GB more than "
                "--memory-fraction allows a rank; raise it, take more ranks on more hosts, or give --kv-cache-gb"
            )
        gb = left_bytes / 2**30 if given_gb is None else given_gb
        per_request = -(-max_model_len // layout.page_size) + layout.num_tail + layout.num_bookmark
        useful = _USEFUL_CACHE * config.max_num_seqs * per_request
        num_pages = num_kv_pages(gb, layout, useful)
        size = CacheSize(layout, num_pages, max_model_len, "")
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


def num_kv_pages(kv_cache_gb: float, layout: CacheLayout, num_useful: int) -> int:
    """Pages that fit in kv_cache_gb * 2**30 bytes, but no more than num_useful. Raises where no request fits."""
    fit = int(kv_cache_gb * 2**30) // layout.page_bytes
    if fit < 1:
        raise ValueError(
            f"--kv-cache-gb {kv_cache_gb}: one page of {layout.page_size} tokens takes {layout.page_bytes} bytes"
        )
    if fit <= layout.num_tail:
        raise ValueError(
            f"--kv-cache-gb {kv_cache_gb}: the smallest request takes {layout.num_tail + 1} pages of "
            f"{layout.page_bytes} bytes"
        )
    return min(fit, num_useful)
