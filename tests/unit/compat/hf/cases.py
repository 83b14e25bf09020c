"""Blocks as transformers loads them from fp8 checkpoints, and the names that published checkpoints use."""

from typing import Any

import torch
from torch import Tensor, nn

from eprt.compat.hf import describe_moe
from eprt.compat.hf.kinds import kind_of
from tests import tiny

# Whole fp8 blocks, as in published models.
WIDE = {"hidden_size": 256, "moe_intermediate_size": 128, "intermediate_size": 256}


def relative_error(y: Tensor, want: Tensor) -> float:
    return ((y - want).float().pow(2).mean().sqrt() / want.float().pow(2).mean().sqrt()).item()


def median_error(y_TH: Tensor, want_TH: Tensor) -> float:
    """Of the median token: rounding the input may give a token other experts."""
    return ((y_TH.float() - want_TH).norm(dim=-1) / want_TH.norm(dim=-1)).median().item()


@torch.no_grad()
def fp8_block(family: str, **overrides: Any) -> tuple[Any, Any]:
    """A block of transformers' own fp8 modules, and a float32 block with the very values of its weights."""
    from transformers import FineGrainedFP8Config
    from transformers.integrations.finegrained_fp8 import replace_with_fp8_linear

    make = {"v3": lambda **fields: tiny.make_variant("v3", **fields), **tiny.OTHER_FAMILIES}[family]
    exact, model = make(**{**WIDE, **overrides}), make(**{**WIDE, **overrides}).bfloat16()
    tiny.round_to_fp8_blocks(exact)
    replace_with_fp8_linear(model, ["gate", "lm_head"], FineGrainedFP8Config(weight_block_size=(128, 128)))
    plain, block = exact.model.layers[-1].mlp, model.model.layers[-1].mlp
    for name in ("gate_up_proj", "down_proj"):
        parts = [_fp8(matrix, 2 if name == "gate_up_proj" else 1) for matrix in getattr(plain.experts, name)]
        setattr(block.experts, name, _frozen(torch.stack([data for data, _ in parts])))
        setattr(block.experts, f"{name}_scale_inv", _frozen(torch.stack([scale for _, scale in parts])))
    for name in ("gate_proj", "up_proj", "down_proj"):
        data, scale = _fp8(getattr(plain.shared_experts, name).weight, 1)
        linear = getattr(block.shared_experts, name)
        linear.weight, linear.weight_scale_inv = _frozen(data), _frozen(scale)
    return block, plain


def _fp8(matrix: Tensor, num_parts: int) -> tuple[Tensor, Tensor]:
    """Each part by itself, as they lie in checkpoints."""
    parts = [tiny.to_fp8_blocks(part) for part in matrix.chunk(num_parts)]
    return torch.cat([data for data, _ in parts]), torch.cat([scale for _, scale in parts])


def _frozen(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)


def names_in_checkpoint(block: Any, prefix: str) -> dict[str, Tensor]:
    """The block's tensors as a published checkpoint of its kind names them."""
    kind, described = kind_of(block), describe_moe(block)
    prefix = prefix.replace(".mlp.", f".{kind.checkpoint_name}.")
    tensors = {"gate.weight": described.gate_weight_EH}
    if described.gate_bias_E is not None:
        tensors["gate.e_score_correction_bias"] = described.gate_bias_E
    for expert in range(described.num_experts):
        for projection, matrix in zip(kind.projections, described.expert(expert)):
            tensors[f"experts.{expert}.{projection}.weight"] = matrix
    for projection, matrix in zip(("gate_proj", "up_proj", "down_proj"), described.shared or ()):
        tensors[f"shared_experts.{projection}.weight"] = matrix
    return {prefix + name: tensor for name, tensor in tensors.items()}
