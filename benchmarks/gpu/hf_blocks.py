"""MoE blocks of transformers in published shapes, with random weights; and which experts kernels transformers has.

Knows transformers; knows nothing of what is measured.
"""

import importlib
from typing import Any, NamedTuple

import torch
from torch import nn


class HfShape(NamedTuple):
    """A published model's MoE layer, as transformers builds it."""

    module: str  # of transformers.models
    config: str  # class of the configuration
    block: str  # class of the block
    sizes: dict[str, Any]  # arguments of the configuration

    def build(self, device: str) -> nn.Module:
        """The block in bf16 with random weights that keep activations in range, ready for inference."""
        module = importlib.import_module(f"transformers.models.{self.module}.modeling_{self.module}")
        config = getattr(importlib.import_module("transformers"), self.config)(**self.sizes)
        with torch.device("meta"):
            block = getattr(module, self.block)(config)
        block = block.to(torch.bfloat16).to_empty(device=device).eval().requires_grad_(False)
        generator = torch.Generator(device).manual_seed(0)
        for parameter in block.parameters():
            for part in parameter if parameter.dim() == 3 else [parameter]:
                part.normal_(0, part.shape[-1] ** -0.5, generator=generator)
        for buffer in block.buffers():
            buffer.zero_()
        return block


DEEPSEEK_V3 = HfShape(
    "deepseek_v3",
    "DeepseekV3Config",
    "DeepseekV3MoE",
    {
        "hidden_size": 7168,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "n_group": 8,
        "topk_group": 4,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
    },
)
QWEN3_235B = HfShape(
    "qwen3_moe",
    "Qwen3MoeConfig",
    "Qwen3MoeSparseMoeBlock",
    {
        "hidden_size": 4096,
        "moe_intermediate_size": 1536,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
    },
)
SHAPES = {"deepseek_v3": DEEPSEEK_V3, "qwen3_235b": QWEN3_235B}

# What transformers computes the experts with. The last two load their kernels from the Hugging Face Hub.
IMPLEMENTATIONS = ("eager", "grouped_mm", "batched_mm", "deepgemm", "sonicmoe")
RECORDABLE = ("grouped_mm", "batched_mm")  # eager asks the GPU which experts were chosen


def use(block: Any, implementation: str) -> None:
    """From now on the block computes its experts so; what transformers reads at each call."""
    block.experts.config._experts_implementation = implementation
