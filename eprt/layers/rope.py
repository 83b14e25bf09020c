"""Rotary embedding tables: plain and YaRN (arXiv:2309.00071), with DeepSeek's two mscale rules.

cos and sin are scaled by mscale(factor, mscale) / mscale(factor, mscale_all_dim), which is 1 in every published
checkpoint; the softmax scale takes mscale(factor, mscale_all_dim) squared (DeepSeek-V3 inference/model.py).
"""

import math

import torch
from torch import Tensor

from eprt.config import RopeConfig


def yarn_mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def softmax_scale(rope: RopeConfig, qk_head_dim: int) -> float:
    """What attention scores are multiplied by: qk_head_dim^-0.5, raised for contexts that YaRN stretches."""
    scale = qk_head_dim**-0.5
    if rope.kind == "yarn" and rope.mscale_all_dim:
        scale *= yarn_mscale(rope.factor, rope.mscale_all_dim) ** 2
    return scale


def cos_sin_table(rope: RopeConfig, dim: int, num_positions: int) -> Tensor:
    """fp32 [num_positions, dim]: cos of the dim/2 angles of each position, then sin."""
    inv_freq = _yarn_inv_freq(rope, dim) if rope.kind == "yarn" else 1.0 / _wavelength(rope, dim)
    angle = torch.arange(num_positions, dtype=torch.float32)[:, None] * inv_freq
    return torch.cat((angle.cos(), angle.sin()), dim=-1) * _attention_factor(rope)


def _wavelength(rope: RopeConfig, dim: int) -> Tensor:
    return rope.theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)


def _yarn_inv_freq(rope: RopeConfig, dim: int) -> Tensor:
    """Fast-turning dimensions keep their frequency, slow ones are divided by factor, a linear ramp joins them. Rounded
    as transformers rounds it: at position 100000 one ulp here is a hundredth of a radian."""
    low, high = (_dimension_turning(turns, rope, dim) for turns in (rope.beta_fast, rope.beta_slow))
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low or 0.001)).clamp(0, 1)
    keep = 1 - ramp
    wavelength = _wavelength(rope, dim)
    return 1.0 / (rope.factor * wavelength) * (1 - keep) + 1.0 / wavelength * keep


def _dimension_turning(turns: float, rope: RopeConfig, dim: int) -> float:
    """The (fractional) dimension that turns this many times over the original context."""
    length = rope.original_max_position_embeddings
    return dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))


def _attention_factor(rope: RopeConfig) -> float:
    if rope.kind != "yarn":
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    return yarn_mscale(rope.factor, rope.mscale) / yarn_mscale(rope.factor, rope.mscale_all_dim)
