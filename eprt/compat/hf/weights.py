"""The weights of a block, read from its modules: fused 3-D parameters (transformers 5) or a list of modules (4).

fp8 weights come with the scales of their blocks of 128 x 128. Copies nothing.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from eprt.compat.hf.block import SwigluMatrices
from eprt.layers.linear import Matrix
from eprt.ops.weight import BLOCK, Weight

SCALE = "_scale_inv"  # behind the name of an fp8 weight; despite "inv", values are multiplied


def expert_shape(experts: Any) -> tuple[int, int]:
    """(number of experts, intermediate size)."""
    if isinstance(experts, nn.ModuleList):
        return len(experts), _projections(experts[0])[0].get_parameter("weight").shape[0]
    return experts.down_proj.shape[0], experts.down_proj.shape[2]


def expert_reader(experts: Any) -> Callable[[int], SwigluMatrices]:
    """The matrices of a logical expert, as they lie in the module."""
    if isinstance(experts, nn.ModuleList):
        modules = list(experts)
        return lambda expert: swiglu_of(modules[expert])
    tensors = tensors_of(experts)

    def fused(expert: int) -> SwigluMatrices:
        gate_up, down = (tensors[name][expert] for name in ("gate_up_proj", "down_proj"))
        if gate_up.dtype != torch.float8_e4m3fn:
            gate, up = gate_up.chunk(2)
            return gate, up, down
        gate, up = _split_fp8(gate_up, tensors["gate_up_proj" + SCALE][expert])
        return gate, up, fp8_weight(down, tensors["down_proj" + SCALE][expert])

    return fused


def swiglu_of(mlp: nn.Module) -> SwigluMatrices:
    gate, up, down = (_matrix(linear) for linear in _projections(mlp))
    return gate, up, down


def first_weight(experts: Any) -> Tensor:
    """One of the experts' weights, for its dtype and device."""
    if isinstance(experts, nn.ModuleList):
        return _projections(experts[0])[0].get_parameter("weight")
    return experts.down_proj


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters(recurse=False)), **dict(module.named_buffers(recurse=False))}


def fp8_weight(data_NK: Tensor, scale: Tensor) -> Weight:
    """scale: fp32 or e8m0, one per block, or one for the whole matrix."""
    blocks = tuple(-(-size // BLOCK) for size in data_NK.shape)
    scale = scale.detach().float()
    return Weight(data_NK.detach(), scale.expand(blocks).contiguous() if scale.numel() == 1 else scale)


def _projections(mlp: nn.Module) -> tuple[nn.Module, nn.Module, nn.Module]:
    """gate_proj, up_proj and down_proj, which Mixtral calls w1, w3 and w2."""
    linears = dict(mlp.named_children())
    names = ("gate_proj", "up_proj", "down_proj") if "gate_proj" in linears else ("w1", "w3", "w2")
    gate, up, down = (linears[name] for name in names)
    return gate, up, down


def _matrix(linear: nn.Module) -> Matrix:
    tensors = tensors_of(linear)
    weight = tensors["weight"]
    return fp8_weight(weight, tensors["weight" + SCALE]) if weight.dtype == torch.float8_e4m3fn else weight.detach()


def _split_fp8(gate_up: Tensor, scale: Tensor) -> tuple[Matrix, Matrix]:
    """Gate and up of a fused matrix [2I, H]. Their scales lie behind each other, unless a block spans both."""
    gate, up = gate_up.chunk(2)
    own_blocks = -(-gate.shape[0] // BLOCK)
    if scale.numel() == 1:
        return fp8_weight(gate, scale), fp8_weight(up, scale)
    if scale.shape[0] == 2 * own_blocks:
        first, second = scale.chunk(2)
        return fp8_weight(gate, first), fp8_weight(up, second)
    gate, up = fp8_weight(gate_up, scale).dequantize().chunk(2)  # quantised again where the layer keeps fp8
    return gate, up
