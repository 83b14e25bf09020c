"""The kinds of MoE blocks that can be replaced: their routing rules and their names in checkpoints, by class name.

Reads transformers' configurations; imports nothing of transformers.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn


@dataclass(frozen=True)
class BlockKind:
    routing: Callable[[Any], dict[str, Any]]  # of a block: fields of MoEConfig
    # What published checkpoints call the block where a model calls it mlp, and gate, up and down of an expert.
    checkpoint_name: str = "mlp"
    projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    has_limit: bool = False  # whether its experts, the shared one too, cut their activations at `limit`


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


def _sigmoid(module: Any) -> dict[str, Any]:
    """DeepSeek V3 and V3.2, GLM-4-MoE."""
    config = module.config
    return {
        "scoring": "sigmoid",
        "top_k": config.num_experts_per_tok,
        "n_group": config.n_group,
        "topk_group": config.topk_group,
        "norm_topk_prob": config.norm_topk_prob,
        "routed_scaling_factor": config.routed_scaling_factor,
    }


def _deepseek_v4(module: Any) -> dict[str, Any]:
    router = module.gate
    return {
        "scoring": "sqrtsoftplus",
        "top_k": router.top_k,
        "routed_scaling_factor": router.routed_scaling_factor,
        "swiglu_limit": module.experts.limit,
    }


def _qwen3_moe(module: Any) -> dict[str, Any]:
    router = _router(module)
    return {"scoring": "softmax_topk", "top_k": router.top_k, "norm_topk_prob": router.norm_topk_prob}


def _mixtral(module: Any) -> dict[str, Any]:
    return {"scoring": "softmax_topk", "top_k": _router(module).top_k, "norm_topk_prob": True}


def _router(module: Any) -> Any:
    """The module with the routing rule: the gate; the block if the gate is a plain linear (transformers 4)."""
    return module if isinstance(module.gate, nn.Linear) else module.gate


KINDS = {
    "deepseekv2moe": BlockKind(_deepseek_v2),
    "deepseekv3moe": BlockKind(_sigmoid),
    "deepseekv32moe": BlockKind(_sigmoid),
    "deepseekv4sparsemoeblock": BlockKind(_deepseek_v4, "ffn", ("w1", "w3", "w2"), has_limit=True),
    "glm4moemoe": BlockKind(_sigmoid),
    "qwen3moesparsemoeblock": BlockKind(_qwen3_moe),
    "mixtralsparsemoeblock": BlockKind(_mixtral, "block_sparse_moe", ("w1", "w3", "w2")),
}


def is_moe_block(module: nn.Module) -> bool:
    return type(module).__name__.lower() in KINDS


def kind_of(module: nn.Module) -> BlockKind:
    """TypeError for any other module."""
    if not is_moe_block(module):
        raise TypeError(f"{type(module).__name__} is not a block of the kinds {', '.join(KINDS)}")
    return KINDS[type(module).__name__.lower()]
