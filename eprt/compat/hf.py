"""Converts the mixture-of-experts blocks of transformers models to expert-parallel ones.

    replace_moe_blocks(model, group)            # a whole model, in place
    EPMoE.from_hf(model.model.layers[3].mlp, group)

Supports DeepSeek V2 and V3 (also their remote-code versions), Qwen3-MoE and Mixtral, with experts as two fused 3-D
parameters (transformers 5) or as a list of modules (transformers 4). Copies only this rank's experts; the others are
freed with the old block. Knows the modules' names and shapes and imports nothing of transformers.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from eprt.config import MoEConfig
from eprt.ep.group.group import EPGroup
from eprt.layers.mlp import MLP
from eprt.layers.moe import EPMoE

SwigluWeights = tuple[Tensor, Tensor, Tensor]  # gate, up, down


@dataclass(frozen=True)
class MoEBlock:
    """A mixture-of-experts block: its routing rule and weights."""

    routing: dict[str, Any]  # fields of MoEConfig
    gate_weight_EH: Tensor
    gate_bias_E: Tensor | None  # added to the scores for the choice only
    num_experts: int
    intermediate_size: int  # of an expert
    expert: Callable[[int], SwigluWeights]  # the weights of a logical expert
    shared: SwigluWeights | None  # the shared expert


def convert_moe(hf_moe_module: nn.Module, group: EPGroup, **options: Any) -> EPMoE:
    """An EPMoE that replaces one block; options as for build_moe. Collective over the group unless ep is given.

    It takes any leading shape and returns what the block returned: hidden, or (hidden, router_logits). TypeError for an
    unknown block, ValueError for an activation, dtype or device that is not supported.
    """
    block = describe_moe(hf_moe_module)
    moe = build_moe(block, group, **options)
    moe.returns_router_logits = _returns_tuple(hf_moe_module, moe.config)
    return moe.train(hf_moe_module.training)


def build_moe(
    block: MoEBlock,
    group: EPGroup,
    *,
    num_max_tokens_per_rank: int = 1024,
    payload: str = "same",
    weight_format: str = "same",
    **options: Any,
) -> EPMoE:
    """An EPMoE with copies of a block's gate, shared expert and this rank's experts.

    num_max_tokens_per_rank, payload, weight_format: see MoEConfig.
    options: for EPMoE (layer_idx, backend, mode, ep, slot_map).
    """
    config = MoEConfig(
        hidden_size=block.gate_weight_EH.shape[1],
        intermediate_size=block.intermediate_size,
        num_experts=block.num_experts,
        shared_intermediate_size=0 if block.shared is None else block.shared[0].shape[0],
        num_max_tokens_per_rank=num_max_tokens_per_rank,
        payload=payload,
        weight_format=weight_format,
        dtype=_checked_dtype(block),
        **block.routing,
    )
    moe = EPMoE(config, group, **options)
    moe.load_gate(_own(block.gate_weight_EH), None if block.gate_bias_E is None else _own(block.gate_bias_E))
    for slot, expert in enumerate(moe.expert_of_slot):
        if expert >= 0:
            gate, up, down = block.expert(expert)
            moe.load_expert(slot, gate.detach(), up.detach(), down.detach())
    if block.shared is not None:
        gate, up, down = block.shared
        moe.load_shared(MLP(_own(gate), _own(up), _own(down), weight_format, config.dtype))
    return moe


def replace_moe_blocks(model: nn.Module, group: EPGroup, **options: Any) -> list[EPMoE]:
    """Replaces every block of the model; returns the new layers in order. Collective.

    The layers share one set of communication buffers, which the first layer's close() frees. options: as for
    convert_moe.
    """
    found = [(name, module) for name, module in model.named_modules() if is_moe_block(module)]
    if not found:
        raise TypeError(f"{type(model).__name__} has no block of the kinds {', '.join(_KINDS)}")
    layers: list[EPMoE] = []
    for layer_idx, (name, module) in enumerate(found):
        shared = {"ep": layers[0].ep, "slot_map": layers[0].slot_map} if layers else {}
        moe = convert_moe(module, group, layer_idx=layer_idx, **{**shared, **options})
        if layers and moe.config != layers[0].config:
            raise ValueError(f"{name} has another shape than the blocks before it: {moe.config}")
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, moe)
        layers.append(moe)
    return layers


def is_moe_block(module: nn.Module) -> bool:
    return type(module).__name__.lower() in _KINDS


def describe_moe(module: nn.Module) -> MoEBlock:
    """Reads a block without changing or copying it."""
    if not is_moe_block(module):
        raise TypeError(f"{type(module).__name__} is not a block of the kinds {', '.join(_KINDS)}")
    children = dict(module.named_children())
    experts, gate = children["experts"], children["gate"]
    num_experts, intermediate_size, expert = _experts(experts)
    _check_activation(experts[0] if isinstance(experts, nn.ModuleList) else experts)
    return MoEBlock(
        routing=_KINDS[type(module).__name__.lower()](module),
        gate_weight_EH=gate.get_parameter("weight"),
        gate_bias_E=_tensors(gate).get("e_score_correction_bias"),
        num_experts=num_experts,
        intermediate_size=intermediate_size,
        expert=expert,
        shared=_linear_weights(children["shared_experts"]) if "shared_experts" in children else None,
    )


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters(recurse=False)), **dict(module.named_buffers(recurse=False))}


# -- routing rules, by class name of the block --


def _deepseek_v2(module: Any) -> dict[str, Any]:
    config = module.config
    grouped = config.topk_method == "group_limited_greedy"
    # transformers' own gate never normalises; DeepSeek's remote code (class MoEGate) normalises or scales.
    normalise = type(module.gate).__name__ == "MoEGate" and config.norm_topk_prob and config.num_experts_per_tok > 1
    return {
        "scoring": "softmax",
        "top_k": config.num_experts_per_tok,
        "n_group": config.n_group if grouped else 1,
        "topk_group": config.topk_group if grouped else 1,
        "norm_topk_prob": normalise,
        "routed_scaling_factor": 1.0 if normalise else config.routed_scaling_factor,
    }


def _deepseek_v3(module: Any) -> dict[str, Any]:
    config = module.config
    return {
        "scoring": "sigmoid",
        "top_k": config.num_experts_per_tok,
        "n_group": config.n_group,
        "topk_group": config.topk_group,
        "norm_topk_prob": config.norm_topk_prob,
        "routed_scaling_factor": config.routed_scaling_factor,
    }


def _qwen3_moe(module: Any) -> dict[str, Any]:
    router = _router(module)
    return {"scoring": "softmax_topk", "top_k": router.top_k, "norm_topk_prob": router.norm_topk_prob}


def _mixtral(module: Any) -> dict[str, Any]:
    return {"scoring": "softmax_topk", "top_k": _router(module).top_k, "norm_topk_prob": True}


def _router(module: Any) -> Any:
    """The module with the routing rule: the gate; the block if the gate is a plain linear (transformers 4)."""
    return module if isinstance(module.gate, nn.Linear) else module.gate


_KINDS: dict[str, Callable[[nn.Module], dict[str, Any]]] = {
    "deepseekv2moe": _deepseek_v2,
    "deepseekv3moe": _deepseek_v3,
    "qwen3moesparsemoeblock": _qwen3_moe,
    "mixtralsparsemoeblock": _mixtral,
}


# -- weights --


def _experts(experts: Any) -> tuple[int, int, Callable[[int], SwigluWeights]]:
    """(number of experts, intermediate size, accessor) of fused 3-D parameters or of a list of modules."""
    if isinstance(experts, nn.ModuleList):
        modules = list(experts)
        return len(modules), _linear_weights(modules[0])[0].shape[0], lambda expert: _linear_weights(modules[expert])
    gate_up_E2IH, down_EHI = experts.gate_up_proj, experts.down_proj

    def fused(expert: int) -> SwigluWeights:
        gate, up = gate_up_E2IH[expert].chunk(2)
        return gate, up, down_EHI[expert]

    return gate_up_E2IH.shape[0], down_EHI.shape[2], fused


def _linear_weights(mlp: nn.Module) -> SwigluWeights:
    """The weights of gate_proj, up_proj and down_proj, which Mixtral calls w1, w3 and w2."""
    linears = dict(mlp.named_children())
    names = ("gate_proj", "up_proj", "down_proj") if "gate_proj" in linears else ("w1", "w3", "w2")
    for name in names:
        if "bias" in _tensors(linears[name]):
            raise ValueError(f"{type(mlp).__name__}.{name} has a bias, which experts here do not have")
    gate, up, down = (linears[name].get_parameter("weight") for name in names)
    return gate, up, down


def _check_activation(module: nn.Module) -> None:
    act_fn = dict(module.named_children()).get("act_fn")
    if act_fn is not None and "silu" not in type(act_fn).__name__.lower():
        raise ValueError(f"{type(module).__name__} uses {type(act_fn).__name__}; only SiLU is supported")


def _checked_dtype(block: MoEBlock) -> torch.dtype:
    weight, _, _ = block.expert(0)
    if weight.device.type != "cpu":
        raise ValueError(f"the experts are on {weight.device}; convert the block on the CPU")
    if weight.dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"the experts are {weight.dtype}; load the model with dtype=torch.bfloat16 or torch.float32")
    return weight.dtype


def _own(weight: Tensor) -> Tensor:
    return weight.detach().clone()


def _returns_tuple(module: nn.Module, config: MoEConfig) -> bool:
    """Whether the block returns router logits too, which depends on the version of transformers: calls it once."""
    was_training = module.training
    with torch.no_grad():
        out = module.eval()(torch.zeros(1, 1, config.hidden_size, dtype=config.dtype))
    module.train(was_training)
    return isinstance(out, tuple)
