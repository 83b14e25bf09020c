"""Weight: a matrix [N, K] as the operators take it, possibly quantised.

Knows how to quantise and dequantise; knows nothing of layers.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 128
FP4_BLOCK = 32  # columns of one scale of fp4
# e8m0 exponents of fp4's scales with which GPUs hold every value exactly: 2^-100 to 2^33. Below, values are rounded to
# multiples of 2^-101; above, they would overflow.
GPU_FP4_SCALES = range(27, 161)
DTYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8, torch.uint8)


# Of the codes 0..15.
_FP4_VALUES = [sign * value for sign in (1.0, -1.0) for value in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)]


@dataclass(frozen=True)
class Weight:
    """One matrix [N, K] or a stack of them [E, N, K], contiguous. value = data * scale."""

    data: Tensor  # float32, bfloat16, float8_e4m3fn or int8; fp4: uint8 [.., N, K / 2], the even column in the low half
    # None for float32 and bfloat16. fp8: fp32 [.., ceil(N / 128), ceil(K / 128)], one per block of 128 x 128.
    # int8: fp32 [.., N], one per output row. fp4: uint8 [.., N, K / 32], the e8m0 exponents of 32 columns each.
    scale: Tensor | None = None

    def __post_init__(self):
        if self.data.dtype not in DTYPES:
            raise ValueError(f"weight dtype {self.data.dtype} is not one of {', '.join(map(str, DTYPES))}")
        if self.data.dim() not in (2, 3):
            raise ValueError(f"a weight is [N, K] or [E, N, K], got shape {tuple(self.data.shape)}")
        *lead, n, k = self.shape
        blocks = (*lead, -(-n // BLOCK), -(-k // BLOCK))
        fp4_blocks = (*lead, n, k // FP4_BLOCK)
        of_dtype = {torch.float8_e4m3fn: blocks, torch.int8: (*lead, n), torch.uint8: fp4_blocks}
        want = of_dtype.get(self.data.dtype)
        have = None if self.scale is None else tuple(self.scale.shape)
        if have != want:
            raise ValueError(f"{self.data.dtype} weight {tuple(self.data.shape)} needs scale {want}, got {have}")
        scale_dtype = torch.uint8 if self.is_fp4 else torch.float32
        if self.scale is not None and self.scale.dtype != scale_dtype:
            raise ValueError(f"scale must be {str(scale_dtype).removeprefix('torch.')}, got {self.scale.dtype}")

    @property
    def is_fp4(self) -> bool:
        return self.data.dtype == torch.uint8

    @property
    def shape(self) -> torch.Size:
        if not self.is_fp4:
            return self.data.shape
        *lead, n, k = self.data.shape
        return torch.Size((*lead, n, 2 * k))

    def matrix(self, i: int) -> "Weight":
        """One of a stack."""
        return Weight(self.data[i], None if self.scale is None else self.scale[i])

    def dequantize(self) -> Tensor:
        """The values in fp32."""
        if self.scale is None:
            return self.data.float()
        if self.is_fp4:
            codes = torch.stack((self.data & 15, self.data >> 4), dim=-1).flatten(-2)
            values = torch.tensor(_FP4_VALUES, device=codes.device)[codes.long()]
            return torch.ldexp(values, self.scale.int().repeat_interleave(FP4_BLOCK, -1) - 127)
        data = self.data.float()
        if self.data.dtype == torch.int8:
            return data * self.scale.unsqueeze(-1)
        n, k = self.data.shape[-2:]
        full = self.scale.repeat_interleave(BLOCK, -2).repeat_interleave(BLOCK, -1)
        return data * full[..., :n, :k]


def require_gpu_scales(w: Weight) -> None:
    """ValueError for fp4 whose scales are larger than GPUs hold. Waits for the GPU."""
    if not w.is_fp4 or w.scale is None or not w.scale.numel():
        return
    if (largest := int(w.scale.max())) >= GPU_FP4_SCALES.stop:
        most = GPU_FP4_SCALES[-1] - 127
        raise ValueError(
            f"an fp4 weight has scales up to 2^{largest - 127}, GPUs compute with at most 2^{most}; use CPU ranks for "
            "this model"
        )


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


def quantize_fp4(w: Tensor) -> Weight:
    """e2m1 with one e8m0 scale per 32 columns: a power of 2 that keeps them within 6. w: [.., N, K] float."""
    blocks = w.float().unflatten(-1, (-1, FP4_BLOCK))
    exponent = torch.frexp(blocks.abs().amax(-1, keepdim=True) / 6)[1].clamp(-126, 127)
    scaled = torch.ldexp(blocks, -exponent).flatten(-2)
    middles = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], device=w.device)
    codes = torch.bucketize(scaled.abs(), middles).to(torch.uint8) + 8 * (scaled < 0).to(torch.uint8)
    low, high = codes.unflatten(-1, (-1, 2)).unbind(-1)
    return Weight((low | high << 4).contiguous(), (exponent.squeeze(-1) + 127).to(torch.uint8).contiguous())
