"""EntryFormat: how DeepSeek-V4's tokens and compressed entries are stored, keys and values in one.

plain   the values, float32 or bfloat16.
fp8     bytes: values that are not rotated in e4m3, rotated ones in bfloat16, the scale of each 64 of the former as the
        exponent of a power of 2 (ue8m0), padding to 8 bytes. Scales are the smallest from max|value| / 448 on. V4:
        448 + 128 + 7 + 1 = 584 bytes instead of 1024.

Every token passes through its format before it is attended to, also in the step that computes it: so a result does not
depend on where a prompt was cut. Knows nothing of pages.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from eprt.ops import native
from eprt.ops.by_device import implementations
from eprt.ops.kv_format import FP8_MAX, SMALLEST_SCALE, power_of_2

GROUP = 64  # values of one scale
_ALIGNMENT = 8


@dataclass(frozen=True)
class EntryFormat:
    """Sizes and dtype of an entry."""

    size: int  # values
    rope_size: int  # of these the last ones, which are rotated
    dtype: torch.dtype  # of the cache tensor; torch.uint8 for fp8

    def __post_init__(self):
        if self.is_fp8 and (self.size % 2 or self.rope_size % 2):
            raise ValueError(
                f"an fp8 KV cache needs entries and rotated parts of a multiple of 2 values, not {self.size} and "
                f"{self.rope_size}; use --kv-cache-dtype bf16"
            )

    @property
    def is_fp8(self) -> bool:
        return self.dtype == torch.uint8

    @property
    def width(self) -> int:
        """Elements of dtype per entry: the last dimension of the cache."""
        if not self.is_fp8:
            return self.size
        return -(-(self._scale_at + self._num_scales) // _ALIGNMENT) * _ALIGNMENT

    @property
    def _num_plain(self) -> int:
        return self.size - self.rope_size

    @property
    def _num_scales(self) -> int:
        return -(-self._num_plain // GROUP)

    @property
    def _scale_at(self) -> int:
        return self._num_plain + 2 * self.rope_size

    def encode(self, values_XD: Tensor) -> Tensor:
        """Stored entries [X, width]."""
        if not self.is_fp8:
            return values_XD.to(self.dtype)
        if values_XD.device.type != "cpu":
            return implementations(values_XD.device.type).encode_entries(values_XD, self)
        entries_XW = torch.empty(len(values_XD), self.width, dtype=torch.uint8)
        native.load().entries_to_fp8(values_XD.contiguous(), self.rope_size, entries_XW)
        return entries_XW

    def encode_slowly(self, values_XD: Tensor) -> Tensor:
        """The oracle of encode(), in plain torch."""
        values, rope = values_XD.float().split([self._num_plain, self.rope_size], dim=-1)
        padded = torch.nn.functional.pad(values, (0, self._num_scales * GROUP - self._num_plain))
        groups = padded.unflatten(-1, (self._num_scales, GROUP))
        scale = power_of_2(groups.abs().amax(-1, keepdim=True) / FP8_MAX).clamp_min(SMALLEST_SCALE)
        codes = (groups / scale).to(torch.float8_e4m3fn).view(torch.uint8).flatten(-2)[:, : self._num_plain]
        exponents = (scale.squeeze(-1).view(torch.int32) >> 23).to(torch.uint8)
        entry = torch.cat([codes, rope.to(torch.bfloat16).view(torch.uint8), exponents], dim=-1)
        return torch.nn.functional.pad(entry, (0, self.width - entry.shape[-1]))

    def decode(self, entries: Tensor) -> Tensor:
        """fp32 [.., size] from stored entries [.., width]."""
        if not self.is_fp8:
            return entries.float()
        ends = [self._num_plain, self._scale_at, self._scale_at + self._num_scales]
        codes, rope, exponents, _ = entries.contiguous().tensor_split(ends, dim=-1)
        scale = (exponents.int() << 23).view(torch.float32).repeat_interleave(GROUP, -1)[..., : self._num_plain]
        values = codes.contiguous().view(torch.float8_e4m3fn).float() * scale
        return torch.cat((values, rope.contiguous().view(torch.bfloat16).float()), dim=-1)
