"""Weight: a matrix [N, K] as the operators take it, possibly quantised.

Knows how to quantise and dequantise; knows nothing of layers.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 128
DTYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8)


@dataclass(frozen=True)
class Weight:
    """One matrix [N, K] or a stack of them [E, N, K], contiguous. value = data * scale."""

    data: Tensor  # float32, bfloat16, float8_e4m3fn or int8
    # None for float32 and bfloat16. fp8: fp32 [.., ceil(N / 128), ceil(K / 128)], one per block of 128 x 128.
    # int8: fp32 [.., N], one per output row.
    scale: Tensor | None = None

    def __post_init__(self):
        if self.data.dtype not in DTYPES:
            raise ValueError(f"weight dtype {self.data.dtype} is not one of {', '.join(map(str, DTYPES))}")
        if self.data.dim() not in (2, 3):
            raise ValueError(f"a weight is [N, K] or [E, N, K], got shape {tuple(self.data.shape)}")
        *lead, n, k = self.data.shape
        blocks = (*lead, -(-n // BLOCK), -(-k // BLOCK))
        want = {torch.float8_e4m3fn: blocks, torch.int8: (*lead, n)}.get(self.data.dtype)
        have = None if self.scale is None else tuple(self.scale.shape)
        if have != want:
            raise ValueError(f"{self.data.dtype} weight {tuple(self.data.shape)} needs scale {want}, got {have}")
        if self.scale is not None and self.scale.dtype != torch.float32:
            raise ValueError(f"scale must be float32, got {self.scale.dtype}")

    @property
    def shape(self) -> torch.Size:
        return self.data.shape

    def dequantize(self) -> Tensor:
        """The values in fp32."""
        data = self.data.float()
        if self.scale is None:
            return data
        if self.data.dtype == torch.int8:
            return data * self.scale.unsqueeze(-1)
        n, k = self.data.shape[-2:]
        full = self.scale.repeat_interleave(BLOCK, -2).repeat_interleave(BLOCK, -1)
        return data * full[..., :n, :k]


def quantize_int8(w: Tensor) -> Weight:
    """Symmetric int8 per output row: scale = max|row| / 127. w: [.., N, K] float."""
    w = w.float()
    # Divided by a tensor: CUDA multiplies by the reciprocal of a number, whose last bit may differ from the CPU's.
    scale = (w.abs().amax(-1) / w.new_full((), 127)).clamp_min(1e-12)
    return Weight((w / scale.unsqueeze(-1)).round().clamp(-127, 127).to(torch.int8).contiguous(), scale)


def quantize_fp8(w: Tensor) -> Weight:
    """e4m3 with one fp32 scale per 128x128 block: scale = max|block| / 448, edges zero-padded. w: [.., N, K] float."""
    w = w.float()
    *lead, n, k = w.shape
    pad_n, pad_k = -n % BLOCK, -k % BLOCK
    blocks = F.pad(w, (0, pad_k, 0, pad_n)).view(*lead, (n + pad_n) // BLOCK, BLOCK, (k + pad_k) // BLOCK, BLOCK)
    scale = (blocks.abs().amax((-3, -1)) / 448).clamp_min(1e-12)
    data = (blocks / scale[..., :, None, :, None]).to(torch.float8_e4m3fn)
    data = data.view(*lead, n + pad_n, k + pad_k)[..., :n, :k].contiguous()
    return Weight(data, scale)
