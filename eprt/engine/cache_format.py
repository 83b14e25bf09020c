"""CacheFormat: what a token takes in one layer's cache: its latent, and with an indexer its index key.

Knows nothing of pages.
"""

from dataclasses import dataclass

import torch

from eprt.config import ModelConfig
from eprt.ops.index_format import IndexFormat
from eprt.ops.kv_format import KVFormat


@dataclass(frozen=True)
class CacheFormat:
    latent: KVFormat
    index: IndexFormat | None = None  # of models with an indexer

    @staticmethod
    def from_name(name: str, model: ModelConfig, model_dtype: torch.dtype) -> "CacheFormat":
        """name: EngineConfig.kv_cache_dtype. ValueError for sizes that fp8 cannot have."""
        latent = KVFormat.from_name(name, model.kv_lora_rank, model.qk_rope_head_dim, model_dtype)
        index = None if model.indexer is None else IndexFormat(model.indexer.head_dim, latent.dtype)
        return CacheFormat(latent, index)

    @property
    def token_bytes(self) -> int:
        return sum(part.width * part.dtype.itemsize for part in (self.latent, self.index) if part is not None)
