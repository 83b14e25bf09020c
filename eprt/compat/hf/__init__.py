"""Mixture-of-experts blocks of transformers models, replaced by expert-parallel ones.

    replace_moe_blocks(model, group)                        # a whole model, in place
    EPMoE.from_hf(model.model.layers[3].mlp, group)         # one block

Supports DeepSeek V2, V3 (also their remote-code versions) and V3.2, GLM-4-MoE, Qwen3-MoE and Mixtral, with experts as
two fused 3-D parameters (transformers 5) or as a list of modules (transformers 4), in float32, bfloat16 or fp8 with
block scales, on a GPU, on the CPU or on the meta device with a loader. Copies only this rank's experts; the others are
freed with the old block. Knows the modules' names and shapes and imports nothing of transformers.
"""

from eprt.compat.hf.block import MoEBlock
from eprt.compat.hf.convert import build_moe, convert_moe, describe_moe, replace_moe_blocks
from eprt.compat.hf.kinds import is_moe_block

__all__ = ["MoEBlock", "build_moe", "convert_moe", "describe_moe", "is_moe_block", "replace_moe_blocks"]
