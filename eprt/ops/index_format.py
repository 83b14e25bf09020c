"""IndexFormat: how the indexer's key of one token or entry is stored (sparse attention of DeepSeek-V3.2 and V4).

plain   the key's values, float32 or bfloat16.
fp8     bytes: the key's Hadamard transform in e4m3, then one fp32 scale, the smallest power of 2 from max|key| / 448
        on. The transform spreads outliers over all values; it is orthogonal, so a query that is transformed too has the
        same products. DeepSeek-V3.2 and V4: 128 + 4 = 132 bytes instead of 256.
fp4     bytes: the transform in e2m1, two values to a byte, the even one in the low half; then the scale of each 32 as
        the exponent of a power of 2 (ue8m0), the smallest from max|value| / 6 on; padding to 4 bytes. V4: 64 + 4 = 68
        bytes.

Knows nothing of pages and of rotations.
"""

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from eprt.ops.by_device import implementations
from eprt.ops.kv_format import FP8_MAX, SMALLEST_SCALE, power_of_2

_SCALE_BYTES = 4
_FP4_GROUP = 32  # values of one scale
_FP4_MAX = 6.0
_FP4_VALUES = (0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6)
_FP4_BOUNDS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)  # halfway between a code's value and the next one's
_EVEN_ABOVE = torch.tensor([False, True] * 3 + [False])


@dataclass(frozen=True)
class IndexFormat:
    """Size and dtype of an index key."""

    size: int  # values
    dtype: torch.dtype  # of the cache tensor; torch.uint8 for fp8 and fp4
    is_fp4: bool = False

    def __post_init__(self):
        if self.is_transformed and (self.size < 4 or self.size & (self.size - 1)):
            name, remedy = ("fp4", "--index-cache-dtype auto") if self.is_fp4 else ("fp8", "--kv-cache-dtype bf16")
            raise ValueError(
                f"an {name} {'index' if self.is_fp4 else 'KV'} cache needs index keys of a power of 2 of at least 4 "
                f"values, not {self.size}; use {remedy}"
            )

    @staticmethod
    def of_pages(size: int, key_pages: Tensor) -> "IndexFormat":
        """That of keys which are stored already."""
        fp8 = IndexFormat(size, key_pages.dtype)
        return IndexFormat(size, key_pages.dtype, is_fp4=fp8.is_transformed and key_pages.shape[-1] < fp8.width)

    @property
    def is_transformed(self) -> bool:
        """Whether the Hadamard transform of keys is stored."""
        return self.dtype == torch.uint8

    @property
    def is_fp8(self) -> bool:
        return self.is_transformed and not self.is_fp4

    @property
    def width(self) -> int:
        """Elements of dtype per key: the last dimension of the cache."""
        if self.is_fp4:
            return -(-(self.size // 2 + -(-self.size // _FP4_GROUP)) // _SCALE_BYTES) * _SCALE_BYTES
        return self.size + _SCALE_BYTES if self.is_fp8 else self.size

    def encode(self, key_TD: Tensor) -> Tensor:
        """Stored keys [T, width] from plain ones [T, size], which are transformed already where the format says so."""
        if not self.is_transformed:
            return key_TD.to(self.dtype)
        if key_TD.device.type != "cpu":
            return implementations(key_TD.device.type).encode_keys(key_TD, self)
        if self.is_fp4:
            return self._encode_fp4(key_TD)
        key = key_TD.float()
        scale = power_of_2(key.abs().amax(-1, keepdim=True) / FP8_MAX).clamp_min(SMALLEST_SCALE)
        values = (key / scale).to(torch.float8_e4m3fn)
        return torch.cat((values.view(torch.uint8), scale.view(torch.uint8)), dim=-1)

    def decode(self, keys: Tensor) -> Tensor:
        """fp32 [.., size] from stored keys [.., width]; transformed where the format says so."""
        if not self.is_transformed:
            return keys.float()
        if self.is_fp4:
            return self._decode_fp4(keys)
        values, scale = keys.split([self.size, _SCALE_BYTES], dim=-1)
        values = values.contiguous().view(torch.float8_e4m3fn).float()
        return values * scale.contiguous().view(torch.float32)

    def _encode_fp4(self, key_TD: Tensor) -> Tensor:
        groups = key_TD.float().unflatten(-1, (-1, min(_FP4_GROUP, self.size)))
        scale = power_of_2(groups.abs().amax(-1, keepdim=True) / _FP4_MAX).clamp_min(SMALLEST_SCALE)
        scaled = (groups / scale).flatten(-2)
        # To nearest, ties to the even code: beyond each bound between two codes, or at it where the upper one is even.
        size = scaled.abs().unsqueeze(-1)
        bounds = torch.tensor(_FP4_BOUNDS)
        code = torch.where(_EVEN_ABOVE, size >= bounds, size > bounds).sum(-1)
        code = (code + 8 * (scaled < 0)).to(torch.uint8)
        exponents = (scale.squeeze(-1).view(torch.int32) >> 23).to(torch.uint8)
        stored = torch.cat((code[..., ::2] | code[..., 1::2] << 4, exponents), dim=-1)
        return torch.nn.functional.pad(stored, (0, self.width - stored.shape[-1]))

    def _decode_fp4(self, keys: Tensor) -> Tensor:
        num_codes, num_groups = self.size // 2, -(-self.size // _FP4_GROUP)
        codes, exponents, _ = keys.tensor_split([num_codes, num_codes + num_groups], dim=-1)
        values = torch.tensor(_FP4_VALUES, device=keys.device)
        each = torch.stack((values[(codes & 15).long()], values[(codes >> 4).long()]), dim=-1).flatten(-2)
        scale = (exponents.int() << 23).view(torch.float32).repeat_interleave(_FP4_GROUP, -1)
        return each * scale[..., : self.size]


@functools.cache
def hadamard(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The Hadamard matrix [size, size] of ones and minus ones, exact in every dtype; size: a power of 2. The orthogonal
    transform divides its products by sqrt(size)."""
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.cat((torch.cat((matrix, matrix), dim=1), torch.cat((matrix, -matrix), dim=1)))
    return matrix.to(device, dtype)
