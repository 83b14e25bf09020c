"""KVFormat: how one token's cache entry, its latent and its rotated key, is stored.

plain   [latent | rotated key], float32 or bfloat16.
fp8     bytes (a cache of torch.uint8): the latent in e4m3, the rotated key in bfloat16, one fp32 scale of both, padding
        to 16 bytes. latent = e4m3 * scale, key = bfloat16 * scale; the scale is the smallest power of 2 from
        max|latent| / 448 on. DeepSeek-V3: 512 + 128 + 4 + 12 = 656 bytes instead of 1152. The rotated key keeps its
        precision because it encodes positions: a power of 2 changes its exponent alone. It is divided too, so that a
        kernel can add both products of a score before it multiplies by the scale. One scale is enough: e4m3 is a
        floating point format, so values 2^13 below the largest still have all their bits.

Knows nothing of pages.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

FP8_MAX = 448.0
# Keeps a latent of zeros from dividing by zero; a power of 2.
SMALLEST_SCALE = 2.0**-40
_ALIGNMENT = 16


@dataclass(frozen=True)
class KVFormat:
    """Sizes and dtype of a cache entry."""

    latent_size: int  # values
    rope_size: int  # values of the rotated key
    dtype: torch.dtype  # of the cache tensor; torch.uint8 for fp8

    def __post_init__(self):
        if self.is_fp8 and (self.latent_size % 4 or self.rope_size % 2):
            raise ValueError(
                f"an fp8 KV cache needs latents of a multiple of 4 values and rotated keys of a multiple of 2, not "
                f"{self.latent_size} and {self.rope_size}; use --kv-cache-dtype bf16"
            )

    @staticmethod
    def from_name(name: str, latent_size: int, rope_size: int, model_dtype: torch.dtype) -> "KVFormat":
        """name: "auto" (the model's dtype), "bf16" or "fp8"."""
        dtype = {"auto": model_dtype, "bf16": torch.bfloat16, "fp8": torch.uint8}[name]
        return KVFormat(latent_size, rope_size, dtype)

    @property
    def is_fp8(self) -> bool:
        return self.dtype == torch.uint8

    @property
    def width(self) -> int:
        """Elements of dtype per entry: the last dimension of the cache."""
        if not self.is_fp8:
            return self.latent_size + self.rope_size
        return -(-(self.latent_size + 2 * self.rope_size + 4) // _ALIGNMENT) * _ALIGNMENT

    def encode(self, kv_TD: Tensor) -> Tensor:
        """Stored entries [T, width] from plain ones [T, latent + rope]. The slow oracle of the GPU's insertion."""
        if not self.is_fp8:
            return kv_TD.to(self.dtype)
        latent, rope = kv_TD.float().split([self.latent_size, self.rope_size], dim=-1)
        scale = power_of_2(latent.abs().amax(-1, keepdim=True) / FP8_MAX).clamp_min(SMALLEST_SCALE)
        parts = ((latent / scale).to(torch.float8_e4m3fn), (rope / scale).to(torch.bfloat16), scale)
        entry = torch.cat([part.contiguous().view(torch.uint8) for part in parts], dim=-1)
        return torch.nn.functional.pad(entry, (0, self.width - entry.shape[-1]))

    def decode(self, entries: Tensor) -> Tensor:
        """Plain entries, fp32 [.., latent + rope], from stored ones [.., width]."""
        if not self.is_fp8:
            return entries.float()
        ends = [self.latent_size, self.latent_size + 2 * self.rope_size, self.latent_size + 2 * self.rope_size + 4]
        latent, rope, scale, _ = entries.contiguous().tensor_split(ends, dim=-1)
        latent, rope = latent.contiguous().view(torch.float8_e4m3fn), rope.contiguous().view(torch.bfloat16)
        return torch.cat((latent.float(), rope.float()), dim=-1) * scale.contiguous().view(torch.float32)


def power_of_2(x: Tensor) -> Tensor:
    """The smallest that is at least x, of fp32 values that are not negative: 0 stays 0."""
    return ((x.view(torch.int32) + 0x7FFFFF) & 0x7F800000).view(torch.float32)
