"""Write and read the V4 demo model under DeepSeek's names, with experts in four bits and everything else in bf16."""

import json
from dataclasses import asdict, fields
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from ..checkpoint import COMMON_FIELDS, write_files
from . import fp4
from .attention import DemoV4Config
from .model import DemoV4Model

_IN_FP32 = ("attn_sink", "ape", "gate.bias")
_OWN_NAMES = "yarn_factor", "yarn_original_positions"


def v4_hf_config(config: DemoV4Config) -> dict:
    """config.json as DeepSeek writes it."""
    sizes = {name: value for name, value in asdict(config).items() if name not in _OWN_NAMES}
    return {
        "architectures": ["DeepseekV4ForCausalLM"],
        "model_type": "deepseek_v4",
        **sizes,
        "num_key_value_heads": 1,
        "n_shared_experts": 1,
        "sliding_window": 128,
        "num_nextn_predict_layers": 1,
        "expert_dtype": "fp4",
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "hidden_act": "silu",
        "rope_scaling": {
            "type": "yarn",
            "factor": config.yarn_factor,
            "original_max_position_embeddings": config.yarn_original_positions,
            "beta_fast": 32,
            "beta_slow": 1,
        },
        **COMMON_FIELDS,
    }


def export_v4_tensors(model: DemoV4Model) -> dict[str, Tensor]:
    """Under DeepSeek's names."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        name, tensor = _stored_name(name), tensor.detach().float() if tensor.is_floating_point() else tensor
        if name.endswith(("ffn.w13", "ffn.w2")):
            tensors |= _split_experts(name, tensor)
        elif "hc_" in name or name.endswith(_IN_FP32) or not tensor.is_floating_point():
            tensors[name] = tensor
        else:
            tensors[name] = tensor.bfloat16()
    return {name: tensor.contiguous().clone() for name, tensor in sorted(tensors.items())}


def _stored_name(name: str) -> str:
    for part in ("hc_attn", "hc_ffn", "hc_head"):
        name = name.replace(f"{part}.", f"{part}_")
    return name.replace("mtp.", "mtp.0.", 1) if name.startswith("mtp.") else name


def _split_experts(name: str, stacked: Tensor) -> dict[str, Tensor]:
    prefix, matrix = name.rsplit(".", 1)
    tensors = {}
    for expert, weight in enumerate(stacked):
        parts = (
            {"w1": weight[: len(weight) // 2], "w3": weight[len(weight) // 2 :]} if matrix == "w13" else {"w2": weight}
        )
        for part, values in parts.items():
            where = f"{prefix}.experts.{expert}.{part}"
            tensors[f"{where}.weight"], tensors[f"{where}.scale"] = fp4.quantise(values)
    return tensors


def save_v4_checkpoint(model: DemoV4Model, directory: Path) -> None:
    """Write config.json, generation_config.json and model.safetensors."""
    write_files(directory, v4_hf_config(model.config), export_v4_tensors(model))


def load_v4_checkpoint(directory: Path) -> DemoV4Model:
    """In fp32, as it is stored, for further training or comparison."""
    content = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    scaling = content["rope_scaling"]
    content |= {
        "compress_ratios": tuple(content["compress_ratios"]),
        "yarn_factor": scaling["factor"],
        "yarn_original_positions": scaling["original_max_position_embeddings"],
    }
    model = DemoV4Model(DemoV4Config(**{field.name: content[field.name] for field in fields(DemoV4Config)}))
    tensors, state = load_file(directory / "model.safetensors"), {}
    for name, current in model.state_dict().items():
        stored = _stored_name(name)
        if not stored.endswith(("ffn.w13", "ffn.w2")):
            state[name] = tensors[stored]
            continue
        prefix, matrix = stored.rsplit(".", 1)
        parts = ("w1", "w3") if matrix == "w13" else ("w2",)
        where = [[f"{prefix}.experts.{expert}.{part}" for part in parts] for expert in range(len(current))]
        state[name] = torch.stack(
            [torch.cat([fp4.read(tensors[f"{w}.weight"], tensors[f"{w}.scale"]) for w in names]) for names in where]
        )
    model.load_state_dict(state)
    return model
