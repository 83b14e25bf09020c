"""Tiny random checkpoints, written by transformers' own classes, and the logits those classes compute from them.

Knows nothing of eprt: the goldens are transformers' word alone. Imported only where transformers is wanted.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
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


# Every way a checkpoint can differ that the model's code has a branch for.
VARIANTS: dict[str, dict[str, Any]] = {
    "v2_lite": {"kind": "v2", "rope_parameters": YARN},
    "v2_groups": {
        "kind": "v2",
        "q_lora_rank": 24,
        "topk_method": "group_limited_greedy",
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 16.0,
    },
    "v3": {"kind": "v3", "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}},
    "v3_plain": {
        "kind": "v3",
        "q_lora_rank": None,
        "attention_bias": True,
        "tie_word_embeddings": True,
        "rope_interleave": False,
        "norm_topk_prob": False,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 0,
    },
    # As many index heads as the release has: with few, scores tie at zero.
    "v32": {
        "kind": "v32",
        "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
        "index_topk": 12,
        "index_head_dim": 16,
        "index_n_heads": 64,
    },
}


def make_variant(name: str, **overrides: Any) -> Any:
    return make_model(**{**VARIANTS[name], **overrides})


def make_model(kind: str, *, seed: int = 0, dtype: torch.dtype = torch.float32, **overrides: Any):
    """A random transformers model of kind "v2", "v3" or "v32", in eval mode, with every term made visible in its
    logits."""
    import transformers

    torch.manual_seed(seed)
    name = f"Deepseek{kind.upper()}"
    config = getattr(transformers, f"{name}Config")(**{**(V2 if kind == "v2" else V3), **overrides})
    cls = getattr(transformers, f"{name}ForCausalLM")
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


# On disk; the weights of the index heads stay as they are.
_FP8_MATRICES = ("_proj.weight", "_with_mqa.weight", ".indexer.wq_b.weight", ".indexer.wk.weight")


def quantize_checkpoint(directory: Path) -> None:
    """Turns a saved checkpoint's matrices into fp8 with 128x128 block scales, as DeepSeek publishes them, and rounds
    nothing else. Written here a second time so that the goldens owe nothing to eprt."""
    from safetensors.torch import load_file, save_file

    path = directory / "model.safetensors"
    tensors = load_file(path)
    for name, tensor in list(tensors.items()):
        if name.endswith(_FP8_MATRICES) and not name.endswith(".weights_proj.weight"):
            tensors[name], tensors[f"{name}_scale_inv"] = to_fp8_blocks(tensor.float())
    save_file(tensors, path, metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    }
    (directory / "config.json").write_text(json.dumps(config))


def to_fp8_blocks(weight: Tensor) -> tuple[Tensor, Tensor]:
    rows, columns = weight.shape
    scale = torch.empty(-(-rows // 128), -(-columns // 128))
    quantized = torch.empty(rows, columns, dtype=torch.float8_e4m3fn)
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            block = slice(i * 128, (i + 1) * 128), slice(j * 128, (j + 1) * 128)
            scale[i, j] = weight[block].abs().max() / 448
            quantized[block] = (weight[block] / scale[i, j]).to(torch.float8_e4m3fn)
    return quantized, scale


def _is_fp8(name: str) -> bool:
    """Of a parameter: whether quantize_checkpoint touches it."""
    in_attention = "_proj" in name and "weights_proj" not in name
    return (in_attention or name.endswith(_FP8_MATRICES[2:])) and not name.endswith("bias")


@torch.no_grad()
def round_to_fp8_blocks(model) -> None:
    """Gives every matrix that quantize_checkpoint touches the value it has after quantisation."""
    for name, tensor in model.named_parameters():
        if _is_fp8(name):
            for matrix in tensor.unbind() if tensor.ndim == 3 else [tensor]:
                # transformers keeps gate and up of an expert in one matrix; on disk they are two.
                for part in matrix.chunk(2) if "gate_up" in name else [matrix]:
                    quantized, scale = to_fp8_blocks(part)
                    full = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
                    part.copy_(quantized.float() * full[: part.shape[0], : part.shape[1]])


@contextmanager
def fp8_activations(model) -> Iterator[None]:
    """transformers' products with the matrices of round_to_fp8_blocks round their activations to e4m3, in blocks of 128
    columns; not those with kv_b_proj, which an absorbed attention has no product with."""
    linear = torch.nn.functional.linear
    rounded = [t for name, t in model.named_parameters() if _is_fp8(name) and "kv_b_proj" not in name and t.ndim > 1]
    starts = {t.data_ptr(): t.data_ptr() + t.nbytes for t in rounded}

    def rounding(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if any(start <= weight.data_ptr() < end for start, end in starts.items()):
            x = to_fp8_columns(x)
        return linear(x, weight, bias)

    torch.nn.functional.linear = rounding
    try:
        yield
    finally:
        torch.nn.functional.linear = linear


def to_fp8_columns(x: Tensor) -> Tensor:
    """Every 128 values of a row rounded to e4m3 under a scale of their own."""
    width = x.shape[-1]
    blocks = torch.nn.functional.pad(x, (0, -width % 128)).unflatten(-1, (-1, 128))
    scale = (blocks.abs().amax(dim=-1, keepdim=True) / 448).clamp(min=1e-12)
    return ((blocks / scale).to(torch.float8_e4m3fn).float() * scale).flatten(-2)[..., :width].to(x.dtype)


def prompts(vocab_size: int = 128, lengths: tuple[int, ...] = (1, 7, 40, 23), seed: int = 1) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(2, vocab_size, (n,), generator=generator).tolist() for n in lengths]


@torch.no_grad()
def golden_logits(model, token_ids: list[int]) -> Tensor:
    """fp32 [tokens, V] of one prompt, in one pass without cache."""
    return model(torch.tensor([token_ids], device=model.device), use_cache=False).logits[0].float()


@torch.no_grad()
def golden_greedy(model, token_ids: list[int], num_new: int) -> list[int]:
    """The next num_new greedy tokens, each by a full forward pass: no cache, no generation settings."""
    tokens = list(token_ids)
    for _ in range(num_new):
        tokens.append(int(golden_logits(model, tokens)[-1].argmax()))
    return tokens[len(token_ids) :]


def make_family(family: str, *, seed: int = 0) -> Any:
    """A random model of one of FAMILIES, with two MoE layers."""
    if family in OTHER_FAMILIES:
        return OTHER_FAMILIES[family](seed)
    return make_variant("v2_lite" if family == "v2" else family, seed=seed)


def make_moe_block(family: str, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
    return make_family(family, seed=seed).to(dtype).model.layers[-1].mlp


def make_qwen3(seed: int = 0, **overrides: Any):
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    fields = {"moe_intermediate_size": 48, "num_experts": 16, "norm_topk_prob": True, **overrides}
    return _make_other(Qwen3MoeForCausalLM, Qwen3MoeConfig, seed, **fields)


def make_mixtral(seed: int = 0, **overrides: Any):
    from transformers import MixtralConfig, MixtralForCausalLM

    return _make_other(MixtralForCausalLM, MixtralConfig, seed, num_local_experts=8, **overrides)


def make_v32(seed: int = 0, **overrides: Any):
    """DeepSeek V3.2: V3 whose attention reads the tokens that an indexer chooses."""
    from transformers import DeepseekV32Config, DeepseekV32ForCausalLM

    indexer = {"index_topk": 64, "index_head_dim": 16, "index_n_heads": 2, "first_k_dense_replace": 1}
    return _make_other(DeepseekV32ForCausalLM, DeepseekV32Config, seed, **{**V3, **indexer, **overrides})


def make_glm4(seed: int = 0, **overrides: Any):
    from transformers import Glm4MoeConfig, Glm4MoeForCausalLM

    fields = {
        "moe_intermediate_size": 48,
        "n_routed_experts": 16,
        "n_shared_experts": 1,
        "first_k_dense_replace": 0,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 2.5,
        **overrides,
    }
    return _make_other(Glm4MoeForCausalLM, Glm4MoeConfig, seed, **fields)


OTHER_FAMILIES = {"v32": make_v32, "glm4": make_glm4, "qwen3": make_qwen3, "mixtral": make_mixtral}
FAMILIES = ("v2", "v2_groups", "v3", *OTHER_FAMILIES)


def _make_other(model_class, config_class, seed: int, **fields: Any):
    torch.manual_seed(seed)
    shape = {
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_experts_per_tok": 2,
    }
    config = config_class(**{**shape, **fields})
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    model = model_class(config).eval()
    randomize(model)
    return model


class OldStyleBlock(torch.nn.Module):
    """A block as transformers 4 had it: experts in a module list, the gate a plain linear, logits returned beside."""

    def __init__(self, block, names: tuple[str, str, str] | None = None):
        super().__init__()
        experts = block.experts
        self.top_k, self.norm_topk_prob = block.gate.top_k, True
        self.gate = torch.nn.Linear(64, experts.num_experts, bias=False)
        self.gate.weight = block.gate.weight
        self.experts = torch.nn.ModuleList(
            _OldStyleExpert(
                gate_up.chunk(2)[0], gate_up.chunk(2)[1], down, names or ("gate_proj", "up_proj", "down_proj")
            )
            for gate_up, down in zip(experts.gate_up_proj.unbind(), experts.down_proj.unbind())
        )
        self._block = [block]  # not a submodule

    def forward(self, hidden):
        return self._block[0](hidden), self.gate(hidden.view(-1, hidden.shape[-1]))


class _OldStyleExpert(torch.nn.Module):
    def __init__(self, gate: Tensor, up: Tensor, down: Tensor, names: tuple[str, str, str]):
        super().__init__()
        self.act_fn = torch.nn.SiLU()
        for name, weight in zip(names, (gate, up, down)):
            linear = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
            linear.weight = torch.nn.Parameter(weight.detach().clone())
            setattr(self, name, linear)
