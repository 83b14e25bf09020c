"""Write and read the demo model as a Hugging Face checkpoint, with one tensor per expert."""

import json
from dataclasses import asdict, fields
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from .model import DemoConfig, DemoModel

COMMON_FIELDS = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
    "use_cache": True,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "torch_dtype": "bfloat16",
}


def hf_config(config: DemoConfig) -> dict:
    """config.json of a DeepseekV3ForCausalLM."""
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        **asdict(config),
        "num_key_value_heads": config.num_attention_heads,
        "num_nextn_predict_layers": 1,
        "moe_layer_freq": 1,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "hidden_act": "silu",
        "rope_scaling": None,
        "rope_interleave": True,
        **COMMON_FIELDS,
    }


def export_tensors(model: DemoModel, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """The tensors under their Hugging Face names; the gate's correction bias stays fp32."""
    tensors = {}
    for name, tensor in model.state_dict().items():
        if name.endswith("e_score_correction_bias"):
            tensors[name] = tensor.float()
        elif ".experts." in name:
            tensors |= _split_experts(name, tensor.to(dtype))
        else:
            tensors[name] = tensor.to(dtype)
    return {name: tensor.detach().cpu().contiguous().clone() for name, tensor in sorted(tensors.items())}


def _split_experts(name: str, stacked: Tensor) -> dict[str, Tensor]:
    prefix, projection = name.rsplit(".", 1)
    if projection == "down_proj":
        return {f"{prefix}.{i}.down_proj.weight": weight for i, weight in enumerate(stacked)}
    tensors = {}
    for i, weight in enumerate(stacked):
        tensors[f"{prefix}.{i}.gate_proj.weight"], tensors[f"{prefix}.{i}.up_proj.weight"] = weight.chunk(2)
    return tensors


def save_checkpoint(model: DemoModel, directory: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write config.json, generation_config.json and model.safetensors."""
    write_files(directory, hf_config(model.config), export_tensors(model, dtype))


def write_files(directory: Path, config: dict, tensors: dict[str, Tensor]) -> None:
    """config: of config.json."""
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    generation = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2, "do_sample": False}
    for name, content in (("config", config), ("generation_config", generation)):
        (directory / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def load_checkpoint(directory: Path, device: str = "cpu", dtype: torch.dtype = torch.bfloat16) -> DemoModel:
    """The model of a checkpoint directory, for further training or evaluation."""
    content = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    config = DemoConfig(**{field.name: content[field.name] for field in fields(DemoConfig)})
    model = DemoModel(config)
    tensors = load_file(directory / "model.safetensors")
    state = {}
    for name, current in model.state_dict().items():
        if ".experts." not in name:
            state[name] = tensors[name]
            continue
        prefix, projection = name.rsplit(".", 1)
        kinds = ("down_proj",) if projection == "down_proj" else ("gate_proj", "up_proj")
        experts = range(len(current))
        state[name] = torch.stack(
            [torch.cat([tensors[f"{prefix}.{i}.{kind}.weight"] for kind in kinds]) for i in experts]
        )
    model.load_state_dict(state)
    biases = {name: buffer.clone() for name, buffer in model.named_buffers() if name.endswith("bias")}
    model.to(device=device, dtype=dtype)
    for name, bias in biases.items():
        model.get_submodule(name.rsplit(".", 1)[0]).e_score_correction_bias = bias.to(device)
    # Rounded angles would turn far positions by whole radians.
    model.cos_LR, model.sin_LR = (buffer.to(device) for buffer in (DemoModel(config).cos_LR, DemoModel(config).sin_LR))
    return model
