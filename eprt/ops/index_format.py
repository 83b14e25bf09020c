"""IndexFormat: how the indexer's key of one token is stored (DeepSeek-V3.2's sparse attention).

plain   the key's values, float32 or bfloat16.
fp8     bytes: the key's Hadamard transform in e4m3, then one fp32 scale, the smallest power of 2 from max|key| / 448
        on. The transform spreads outliers over all values; it is orthogonal, so a query that is transformed too has the
        same products. DeepSeek-V3.2: 128 + 4 = 132 bytes instead of 256.

Knows nothing of pages and of rotations.
"""

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from eprt.ops.kv_format import FP8_MAX, SMALLEST_SCALE, power_of_2

_SCALE_BYTES = 4


@dataclass(frozen=True)
class IndexFormat:
    """Size and dtype of an index key."""

    size: int  # values
    dtype: torch.dtype  # of the cache tensor; torch.uint8 for fp8

    def __post_init__(self):
        if self.is_fp8 and (self.size < 4 or self.size & (self.size - 1)):
            raise ValueError(
                f"an fp8 KV cache needs index keys of a power of 2 of at least 4 values, not {self.size}; use "
                "--kv-cache-dtype bf16"
            )

    @property
    def is_fp8(self) -> bool:
        return self.dtype == torch.uint8

    @property
    def width(self) -> int:
        """Elements of dtype per key: the last dimension of the cache."""
        return self.size + _SCALE_BYTES if self.is_fp8 else self.size

    def encode(self, key_TD: Tensor) -> Tensor:
        """Stored keys [T, width] from plain ones [T, size], which are transformed already where the format is fp8."""
        if not self.is_fp8:
            return key_TD.to(self.dtype)
        key = key_TD.float()
        scale = power_of_2(key.abs().amax(-1, keepdim=True) / FP8_MAX).clamp_min(SMALLEST_SCALE)
        values = (key / scale).to(torch.float8_e4m3fn)
        return torch.cat((values.view(torch.uint8), scale.view(torch.uint8)), dim=-1)

    def decode(self, keys: Tensor) -> Tensor:
        """fp32 [.., size] from stored keys [.., width]; transformed where the format is fp8."""
        if not self.is_fp8:
            return keys.float()
        values, scale = keys.split([self.size, _SCALE_BYTES], dim=-1)
        values = values.contiguous().view(torch.float8_e4m3fn).float()
        return values * scale.contiguous().view(torch.float32)


@functools.cache
def hadamard(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The Hadamard matrix [size, size] of ones and minus ones, exact in every dtype; size: a power of 2. The orthogonal
    transform divides its products by sqrt(size)."""
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.cat((torch.cat((matrix, matrix), dim=1), torch.cat((matrix, -matrix), dim=1)))
    return matrix.to(device, dtype)
