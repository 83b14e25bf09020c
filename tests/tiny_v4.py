"""Tiny random DeepSeek V4 checkpoints, written under DeepSeek's own names, and what transformers computes from them.

Knows nothing of eprt. The MTP layer, which transformers lacks, is made of its decoder layer.
"""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

RATIOS = (0, 128, 4, 128, 4)
YARN = {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 64, "beta_fast": 32, "beta_slow": 1}
CONFIG: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "moe_intermediate_size": 32,
    "num_hidden_layers": len(RATIOS),
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "qk_rope_head_dim": 8,
    "q_lora_rank": 48,
    "o_groups": 2,
    "o_lora_rank": 24,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "routed_scaling_factor": 1.5,
    "swiglu_limit": 1.0,
    "index_n_heads": 64,
    "index_head_dim": 16,
    "index_topk": 40,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "max_position_embeddings": 1024,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "rope_theta": 10000.0,
    "compress_rope_theta": 160000.0,
    "num_hash_layers": 2,
    "compress_ratios": list(RATIOS),
    "rms_norm_eps": 1e-6,
}
# What transformers calls a part of a name -> what DeepSeek does, in this order.
_NAMES = (
    ("model.embed_tokens.", "embed."),
    ("lm_head.", "head."),
    ("model.hc_head.hc_", "hc_head_"),
    ("model.", ""),
    (".self_attn.compressor.indexer.kv_proj", ".attn.indexer.compressor.wkv"),
    (".self_attn.compressor.indexer.gate_proj", ".attn.indexer.compressor.wgate"),
    (".self_attn.compressor.indexer.position_bias", ".attn.indexer.compressor.ape"),
    (".self_attn.compressor.indexer.kv_norm", ".attn.indexer.compressor.norm"),
    (".self_attn.compressor.indexer.q_b_proj", ".attn.indexer.wq_b"),
    (".self_attn.compressor.indexer.scorer.weights_proj", ".attn.indexer.weights_proj"),
    (".self_attn.compressor.kv_proj", ".attn.compressor.wkv"),
    (".self_attn.compressor.gate_proj", ".attn.compressor.wgate"),
    (".self_attn.compressor.position_bias", ".attn.compressor.ape"),
    (".self_attn.compressor.kv_norm", ".attn.compressor.norm"),
    (".self_attn.q_a_proj", ".attn.wq_a"),
    (".self_attn.q_a_norm", ".attn.q_norm"),
    (".self_attn.q_b_proj", ".attn.wq_b"),
    (".self_attn.kv_proj", ".attn.wkv"),
    (".self_attn.kv_norm", ".attn.kv_norm"),
    (".self_attn.o_a_proj", ".attn.wo_a"),
    (".self_attn.o_b_proj", ".attn.wo_b"),
    (".self_attn.sinks", ".attn.attn_sink"),
    (".input_layernorm", ".attn_norm"),
    (".post_attention_layernorm", ".ffn_norm"),
    (".attn_hc.", ".hc_attn_"),
    (".ffn_hc.", ".hc_ffn_"),
    (".mlp.gate.e_score_correction_bias", ".ffn.gate.bias"),
    (".mlp.shared_experts.gate_proj", ".ffn.shared_experts.w1"),
    (".mlp.shared_experts.up_proj", ".ffn.shared_experts.w3"),
    (".mlp.shared_experts.down_proj", ".ffn.shared_experts.w2"),
    (".mlp.", ".ffn."),
)


def make_model(seed: int = 0, **overrides: Any) -> Any:
    """A random transformers model in eval mode, float32, with every term made visible in its logits."""
    from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

    torch.manual_seed(seed)
    fields = {**CONFIG, "rope_parameters": dict(YARN), **overrides}
    config = DeepseekV4Config(**fields)
    config._attn_implementation = config._experts_implementation = "eager"
    model = DeepseekV4ForCausalLM(config).eval()
    randomize(model)
    return model


@torch.no_grad()
def randomize(model: Any) -> None:
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if name.endswith("tid2eid"):
            num_experts = model.config.n_routed_experts
            rows = [torch.randperm(num_experts)[: tensor.shape[1]] for _ in range(len(tensor))]
            tensor.copy_(torch.stack(rows))
        elif "inv_freq" in name:
            pass
        elif "norm" in name:
            tensor.copy_(1 + 0.2 * torch.randn_like(tensor))
        elif name.endswith(("bias", "base")):
            tensor.normal_(0, 0.3)
        elif name.endswith("sinks"):
            tensor.normal_(1, 0.5)
        elif name.endswith("scale"):
            tensor.uniform_(0.5, 1.5)
        elif name.endswith("gate.weight"):
            tensor.normal_(0, 0.3)
        elif tensor.ndim >= 2:
            tensor.normal_(0, tensor.shape[-1] ** -0.5)


def tensors_of(model: Any) -> dict[str, Tensor]:
    """Under DeepSeek's names, every expert by itself."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        if "inv_freq" in name:
            continue
        for theirs, ours in _NAMES:
            name = name.replace(theirs, ours)
        if ".experts.gate_up_proj" in name:
            for expert, both in enumerate(tensor.unbind()):
                prefix = name.replace("gate_up_proj", str(expert))
                tensors[f"{prefix}.w1.weight"], tensors[f"{prefix}.w3.weight"] = both.chunk(2)
        elif ".experts.down_proj" in name:
            for expert, down in enumerate(tensor.unbind()):
                tensors[f"{name.replace('down_proj', str(expert))}.w2.weight"] = down
        else:
            tensors[name] = tensor
    return {name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}


def config_of(model: Any, **overrides: Any) -> dict[str, Any]:
    """config.json as DeepSeek writes it."""
    fields = {
        name: getattr(model.config, name) for name in CONFIG if name not in ("compress_ratios", "num_hash_layers")
    }
    ratio = {"sliding_attention": 0, "compressed_sparse_attention": 4, "heavily_compressed_attention": 128}
    yarn = {"type": "yarn", **{name: value for name, value in YARN.items() if name != "rope_type"}}
    return {
        **fields,
        "model_type": "deepseek_v4",
        "architectures": ["DeepseekV4ForCausalLM"],
        "compress_ratios": [*(ratio[kind] for kind in model.config.layer_types), 0],
        "num_hash_layers": model.config.mlp_layer_types.count("hash_moe"),
        "num_nextn_predict_layers": 0,
        "rope_scaling": yarn,
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "torch_dtype": "float32",
        **overrides,
    }


def save(model: Any, directory: Path, *, more: dict[str, Tensor] | None = None, **overrides: Any) -> Path:
    """more: tensors besides the model's, as those of an MTP layer."""
    from safetensors.torch import save_file

    directory.mkdir(parents=True, exist_ok=True)
    save_file({**tensors_of(model), **(more or {})}, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config_of(model, **overrides)))
    return directory


def mtp_tensors(model: Any, seed: int = 5) -> dict[str, Tensor]:
    """An MTP layer under DeepSeek's names, random, as large as the model's own layers; of ratio 0."""
    from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

    fields = {**CONFIG, **{name: getattr(model.config, name) for name in ("vocab_size", "hidden_size")}}
    fields |= {"num_hidden_layers": 1, "compress_ratios": [0], "num_hash_layers": 0}
    torch.manual_seed(seed)
    layer = DeepseekV4ForCausalLM(DeepseekV4Config(**fields, rope_parameters=dict(YARN)))
    randomize(layer)
    tensors = {
        f"mtp.0.{name.removeprefix('layers.0.')}": tensor
        for name, tensor in tensors_of(layer).items()
        if name.startswith(("layers.0.", "hc_head_", "norm."))
    }
    size = model.config.hidden_size
    for name in ("e_proj", "h_proj"):
        tensors[f"mtp.0.{name}.weight"] = torch.randn(size, size) * size**-0.5
    for name in ("enorm", "hnorm"):
        tensors[f"mtp.0.{name}.weight"] = 1 + 0.2 * torch.randn(size)
    return tensors


def to_fp4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Bytes of two e2m1 values, int8, and e8m0 exponents of 32 columns. Value by value, so that it owes nothing to
    anybody."""
    values = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    rows, columns = weight.shape
    codes, exponents = (
        torch.empty(rows, columns, dtype=torch.int64),
        torch.empty(rows, columns // 32, dtype=torch.uint8),
    )
    for block in range(columns // 32):
        part = weight[:, block * 32 : block * 32 + 32]
        exponent = torch.ceil(torch.log2(part.abs().amax(1) / 6))
        exponents[:, block] = (exponent + 127).to(torch.uint8)
        scaled = part / 2 ** exponent[:, None]
        nearest = (scaled.abs()[..., None] - torch.tensor(values)).abs().argmin(-1)
        codes[:, block * 32 : block * 32 + 32] = nearest + 8 * (scaled < 0)
    packed = (codes[:, 0::2] | codes[:, 1::2] << 4).to(torch.uint8)
    return packed.view(torch.int8), exponents.view(torch.float8_e8m0fnu)


def from_fp4(packed: Tensor, scale: Tensor) -> Tensor:
    values = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    values = torch.cat((values, -values))
    packed = packed.view(torch.uint8).long()
    pairs = torch.stack((values[packed & 15], values[packed >> 4]), dim=-1).flatten(1)
    return pairs * scale.float().repeat_interleave(32, 1)


def to_fp8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """e4m3 with e8m0 scales of blocks of 128 x 128."""
    rows, columns = weight.shape
    scale, quantised = torch.empty(-(-rows // 128), -(-columns // 128)), torch.empty_like(weight)
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            block = slice(i * 128, i * 128 + 128), slice(j * 128, j * 128 + 128)
            scale[i, j] = 2 ** torch.ceil(torch.log2(weight[block].abs().max() / 448))
            quantised[block] = weight[block] / scale[i, j]
    return quantised.to(torch.float8_e4m3fn), scale.to(torch.float8_e8m0fnu)


def from_fp8(quantised: Tensor, scale: Tensor) -> Tensor:
    rows, columns = quantised.shape
    full = scale.float().repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
    return quantised.float() * full


_FP8 = (".wq_a.", ".wq_b.", ".attn.wkv.", ".wo_a.", ".wo_b.", ".shared_experts.", ".e_proj.", ".h_proj.")


def quantise(directory: Path, expert_dtype: str) -> dict[str, Tensor]:
    """Turns a saved checkpoint into one as published: fp8 matrices and fp4 or fp8 experts, with NAME.scale.

    Returns what its tensors then mean, in float32.
    """
    from safetensors.torch import load_file, save_file

    tensors, meaning = load_file(directory / "model.safetensors"), {}
    for name, tensor in list(tensors.items()):
        meaning[name] = tensor
        is_expert = ".ffn.experts." in name
        if not is_expert and not any(part in name for part in _FP8):
            continue
        is_fp4 = is_expert and expert_dtype == "fp4"
        data, scale = (to_fp4 if is_fp4 else to_fp8)(tensor)
        tensors[name], tensors[f"{name.removesuffix('weight')}scale"] = data, scale
        meaning[name] = (from_fp4 if is_fp4 else from_fp8)(data, scale)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    config["expert_dtype"] = expert_dtype
    config["quantization_config"] = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "scale_fmt": "ue8m0",
    }
    (directory / "config.json").write_text(json.dumps(config))
    return meaning


@torch.no_grad()
def assign(model: Any, tensors: dict[str, Tensor]) -> None:
    """Gives a transformers model the values of tensors under DeepSeek's names."""
    own = model.state_dict()
    for name in own:
        ours = name
        for theirs, new in _NAMES:
            ours = ours.replace(theirs, new)
        if ".experts.gate_up_proj" in ours:
            for expert, both in enumerate(own[name].unbind()):
                prefix = ours.replace("gate_up_proj", str(expert))
                both.copy_(torch.cat((tensors[f"{prefix}.w1.weight"], tensors[f"{prefix}.w3.weight"])))
        elif ".experts.down_proj" in ours:
            for expert, down in enumerate(own[name].unbind()):
                down.copy_(tensors[f"{ours.replace('down_proj', str(expert))}.w2.weight"])
        elif ours in tensors:
            own[name].copy_(tensors[ours])
