"""The small operators of a layer in plain torch, as one writes them for torch.compile. On any device.

Names and results are those of eprt.ops and of eprt.ops.cuda's quantising forms. Knows nothing of how they are compiled.
"""

import torch
from torch import Tensor

from eprt.ops.elementwise import Rotation
from eprt.ops.gate import GateRule
from eprt.ops.weight import BLOCK

_LARGEST_E4M3 = 448.0
_SMALLEST_SCALE = 1e-12


def rms_norm(x_TH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
    value = x_TH.float()
    value = value * torch.rsqrt(value.square().mean(-1, keepdim=True) + eps)
    return (value * weight_H.float()).to(x_TH.dtype)


def add_rms_norm(x_TH: Tensor, residual_TH: Tensor, weight_H: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    sum_TH = x_TH + residual_TH
    return rms_norm(sum_TH, weight_H, eps), sum_TH


def rms_norm_quantize(x_TH: Tensor, weight_H: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return quantize_rows(rms_norm(x_TH, weight_H, eps))


def silu_mul(x_TI2: Tensor) -> Tensor:
    return _silu_mul(x_TI2).to(x_TI2.dtype)


def silu_mul_quantize(x_TI2: Tensor) -> tuple[Tensor, Tensor]:
    return quantize_rows(_silu_mul(x_TI2))


def _silu_mul(x_TI2: Tensor) -> Tensor:
    gate, up = x_TI2.float().chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def quantize_rows(x_MK: Tensor) -> tuple[Tensor, Tensor]:
    """K must be a multiple of 128."""
    groups = x_MK.float().unflatten(-1, (-1, BLOCK))
    scale_MG = (groups.abs().amax(-1) / _LARGEST_E4M3).clamp_min(_SMALLEST_SCALE)
    return (groups / scale_MG[..., None]).to(torch.float8_e4m3fn).flatten(1), scale_MG


def rope(x_TNR: Tensor, rotation: Rotation) -> Tensor:
    cos, sin = rotation.cos_sin_PR[rotation.position_T][:, None].chunk(2, dim=-1)
    if rotation.interleaved:
        a, b = x_TNR.float().unflatten(-1, (-1, 2)).unbind(-1)
        return torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2).to(x_TNR.dtype)
    a, b = x_TNR.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x_TNR.dtype)


def add_rows(x_TH: Tensor, y_TH: Tensor, z_TH: Tensor) -> Tensor:
    return x_TH + (y_TH + z_TH)


def gate_topk(logits_TE: Tensor, bias_E: Tensor, rule: GateRule) -> tuple[Tensor, Tensor]:
    """DeepSeek V3's rule: sigmoid scores, the best groups by the sum of their two best experts."""
    score_TE = logits_TE.sigmoid()
    choice = (score_TE + bias_E).unflatten(-1, (rule.n_group, -1))
    best_groups = choice.topk(2, dim=-1).values.sum(-1).topk(rule.topk_group, dim=-1).indices
    kept = torch.zeros(choice.shape[:2], dtype=torch.bool, device=choice.device).scatter(1, best_groups, True)
    chosen_TK = choice.masked_fill(~kept[..., None], float("-inf")).flatten(1).topk(rule.top_k, dim=-1).indices
    weights_TK = score_TE.gather(1, chosen_TK)
    if rule.norm_topk_prob:
        weights_TK = weights_TK / (weights_TK.sum(-1, keepdim=True) + 1e-20)
    return weights_TK * rule.routed_scaling_factor, chosen_TK
