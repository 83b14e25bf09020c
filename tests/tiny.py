"""Tiny random checkpoints, written by transformers' own classes, and the logits those classes compute from them.

Knows nothing of eprt: the goldens are transformers' word alone. Imported only where transformers is wanted.
"""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
}

_BASE: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
V2: dict[str, Any] = {**_BASE, "q_lora_rank": None, "n_shared_experts": 2, "routed_scaling_factor": 1.0}
V3: dict[str, Any] = {
    **_BASE,
    "q_lora_rank": 24,
    "n_shared_experts": 1,
    "n_group": 4,
    "topk_group": 2,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
}


def make_model(kind: str, *, seed: int = 0, dtype: torch.dtype = torch.float32, **overrides: Any):
    """A random transformers model of kind "v2" or "v3", in eval mode, with every term made visible in its logits."""
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM, DeepseekV3Config, DeepseekV3ForCausalLM

    torch.manual_seed(seed)
    if kind == "v2":
        config, cls = DeepseekV2Config(**{**V2, **overrides}), DeepseekV2ForCausalLM
    else:
        config, cls = DeepseekV3Config(**{**V3, **overrides}), DeepseekV3ForCausalLM
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    model = cls(config).eval()
    randomize(model)
    return model.to(dtype)


@torch.no_grad()
def randomize(model) -> None:
    """Larger weights than transformers' initialisation, so that logits differ well; norms and biases off their
    neutral values, so that leaving one out shows."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if name.endswith("e_score_correction_bias"):
            tensor.normal_(0, 0.1)
        elif "norm" in name:
            tensor.copy_(1 + 0.2 * torch.randn_like(tensor))
        elif name.endswith("bias"):
            tensor.normal_(0, 0.1)
        elif name.endswith("gate.weight"):
            tensor.normal_(0, 0.3)
        elif tensor.ndim >= 2:
            tensor.normal_(0, tensor.shape[-1] ** -0.5)


def save(model, directory: Path, *, old_rope_spelling: bool = False, **save_options: Any) -> Path:
    """Writes the checkpoint; old_rope_spelling: rope_theta and rope_scaling, as in the published DeepSeek configs."""
    model.save_pretrained(directory, **save_options)
    if old_rope_spelling:
        path = directory / "config.json"
        config = json.loads(path.read_text())
        rope = config.pop("rope_parameters")
        config["rope_theta"] = rope.pop("rope_theta")
        kind = rope.pop("rope_type")
        config["rope_scaling"] = None if kind == "default" else {"type": kind, **rope}
        config["torch_dtype"] = config.pop("dtype", "float32")
        path.write_text(json.dumps(config))
    return directory


def prompts(vocab_size: int = 128, lengths: tuple[int, ...] = (1, 7, 40, 23), seed: int = 1) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(2, vocab_size, (n,), generator=generator).tolist() for n in lengths]


@torch.no_grad()
def golden_logits(model, token_ids: list[int]) -> Tensor:
    """fp32 [tokens, V] of one prompt, in one pass without cache."""
    return model(torch.tensor([token_ids]), use_cache=False).logits[0].float()


@torch.no_grad()
def golden_greedy(model, token_ids: list[int], num_new: int) -> list[int]:
    """The next num_new greedy tokens, each by a full forward pass: no cache, no generation settings."""
    tokens = list(token_ids)
    for _ in range(num_new):
        tokens.append(int(golden_logits(model, tokens)[-1].argmax()))
    return tokens[len(token_ids) :]
