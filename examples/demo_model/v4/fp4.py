"""Four-bit experts: e2m1 values with an e8m0 exponent for 32 columns, as DeepSeek V4 stores them."""

import torch
from torch import Tensor

BLOCK = 32
_VALUES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_LARGEST_SCALED = 7.0  # a block's largest value may lose this much over 6, since half the values would lose more


def fake_quantise(weight: Tensor) -> Tensor:
    """What four bits make of a weight; its gradient passes as if nothing had happened."""
    return weight + (dequantise(*_round(weight.detach())) - weight).detach()


def _round(weight: Tensor) -> tuple[Tensor, Tensor]:
    """(multiples of 0.5 that e2m1 has, [..., blocks, 32], exponents [..., blocks])"""
    blocks = weight.float().unflatten(-1, (-1, BLOCK))
    largest = blocks.abs().amax(-1, keepdim=True).clamp(min=1e-30)
    exponent = (largest / _LARGEST_SCALED).log2().ceil().clamp(-127, 127)
    scaled = blocks * torch.exp2(-exponent)
    size = scaled.abs()
    step = 0.5 + 0.5 * (size >= 2) + (size >= 4)
    return ((scaled / step).round() * step).clamp(-6, 6), exponent.squeeze(-1)


def dequantise(scaled: Tensor, exponent: Tensor) -> Tensor:
    return (scaled * torch.exp2(exponent).unsqueeze(-1)).flatten(-2)


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """(two values a byte, the even column in the low bits, int8 [rows, columns / 2]; e8m0 [rows, columns / 32])"""
    scaled, exponent = _round(weight)
    code = torch.searchsorted(_VALUES, scaled.abs().flatten(-2).contiguous()) + 8 * (scaled.flatten(-2) < 0)
    code = code.to(torch.uint8)
    packed = code[..., 0::2] | code[..., 1::2] << 4
    return packed.view(torch.int8), (exponent + 127).to(torch.uint8).view(torch.float8_e8m0fnu)


def read(packed: Tensor, scale: Tensor) -> Tensor:
    """fp32 [rows, columns] of what quantise() wrote."""
    values = torch.cat((_VALUES, -_VALUES))
    packed = packed.view(torch.uint8).long()
    scaled = torch.stack((values[packed & 15], values[packed >> 4]), -1).flatten(-2).unflatten(-1, (-1, BLOCK))
    return dequantise(scaled, scale.view(torch.uint8).float() - 127)
