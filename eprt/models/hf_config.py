"""config.json (and generation_config.json) of a Hugging Face directory -> ModelConfig.

Where transformers and DeepSeek's own model code read a field differently, DeepSeek's code is followed.
"""

from pathlib import Path
from typing import Any

import torch

from eprt.config import EngineConfig, IndexerConfig, ModelConfig, MoEConfig, RopeConfig
from eprt.models.config_file import ConfigFile
from eprt.models.generation_config import open_generation_config
from eprt.models.hf_fields import take_dtype, take_eos_token_ids, take_num_layers
from eprt.models.model_types import take_model_type, take_quant_method
from eprt.models.v4_hf_config import read_v4_config

# What transformers' releases call the attention of every layer of V3.2.
_SPARSE_LAYERS = ("indexed_attention", "deepseek_sparse_attention")


def read_model_config(engine: EngineConfig) -> ModelConfig:
    """Reads engine.model_dir/config.json; ValueError names the file, the field and the value."""
    file = ConfigFile(Path(engine.model_dir) / "config.json")
    model_type = take_model_type(file)
    if model_type == "deepseek_v4":
        return read_v4_config(file, engine)
    file.only("hidden_act", "silu")
    file.only("mlp_bias", False)
    file.only("moe_layer_freq", 1)
    heads = file.size("num_attention_heads")
    file.only("num_key_value_heads", heads)
    dtype = take_dtype(file, engine.dtype)
    return file.build(
        ModelConfig,
        model_type=model_type,
        vocab_size=file.size("vocab_size"),
        hidden_size=file.size("hidden_size"),
        intermediate_size=file.size("intermediate_size"),
        num_hidden_layers=take_num_layers(file, engine),
        num_attention_heads=heads,
        q_lora_rank=file.size("q_lora_rank", None),
        kv_lora_rank=file.size("kv_lora_rank"),
        qk_nope_head_dim=file.size("qk_nope_head_dim"),
        qk_rope_head_dim=file.size("qk_rope_head_dim"),
        v_head_dim=file.size("v_head_dim"),
        first_k_dense_replace=_num_dense_layers(file, model_type),
        moe=_moe_config(file, engine, model_type, dtype),
        dtype=dtype,
        rope=_rope_config(file),
        rms_norm_eps=file.number("rms_norm_eps", 1e-6),
        max_position_embeddings=file.size("max_position_embeddings"),
        tie_word_embeddings=file.flag("tie_word_embeddings", False),
        attention_bias=file.flag("attention_bias", False),
        rope_interleave=file.flag("rope_interleave", True),
        num_nextn_predict_layers=file.integer("num_nextn_predict_layers", 0),
        bos_token_id=file.take("bos_token_id", int, None),
        eos_token_ids=take_eos_token_ids(file, open_generation_config(engine)),
        quant_method=take_quant_method(file),
        indexer=_indexer_config(file) if model_type == "deepseek_v32" else None,
    )


def _num_dense_layers(file: ConfigFile, model_type: str) -> int:
    """Leading layers without experts: their number, or the kind of each layer (transformers' spelling)."""
    kinds = file.take("mlp_layer_types", list, None)
    if kinds is None or file.fields.get("first_k_dense_replace") is not None:
        return file.integer("first_k_dense_replace", 0 if model_type == "deepseek_v2" else 3)
    num_dense = kinds.index("sparse") if "sparse" in kinds else len(kinds)
    if kinds != ["dense"] * num_dense + ["sparse"] * (len(kinds) - num_dense):
        raise ValueError(f"{file.where}: mlp_layer_types={kinds} is not supported, only 'dense' layers before 'sparse'")
    return num_dense


def _indexer_config(file: ConfigFile) -> IndexerConfig:
    kinds = file.take("layer_types", list, [])
    if any(kind not in _SPARSE_LAYERS for kind in kinds):
        raise ValueError(f"{file.where}: layer_types={kinds} is not supported, only {' or '.join(_SPARSE_LAYERS)}")
    return file.build(
        IndexerConfig,
        num_heads=file.size("index_n_heads", 64),
        head_dim=file.size("index_head_dim", 128),
        top_k=file.size("index_topk", 2048),
    )


def _moe_config(file: ConfigFile, engine: EngineConfig, model_type: str, dtype: torch.dtype) -> MoEConfig | None:
    num_experts = file.integer("n_routed_experts", 0)
    if num_experts == 0:
        return None
    top_k = file.integer("num_experts_per_tok")
    intermediate_size = file.integer("moe_intermediate_size")
    return file.build(
        MoEConfig,
        hidden_size=file.integer("hidden_size"),
        intermediate_size=intermediate_size,
        num_experts=num_experts,
        top_k=top_k,
        shared_intermediate_size=file.integer("n_shared_experts", 0) * intermediate_size,
        num_max_tokens_per_rank=max(engine.chunk_size, engine.max_num_seqs),
        payload=engine.ep_payload,
        weight_format=engine.quantization or "same",
        dtype=dtype,
        **(_v2_gate(file, top_k) if model_type == "deepseek_v2" else _v3_gate(file)),
    )


def _v3_gate(file: ConfigFile) -> dict[str, Any]:
    """Absent fields are what DeepSeek's configuration class says; groups of null are none."""
    file.only("scoring_func", "sigmoid")
    file.only("topk_method", "noaux_tc")
    return {
        "scoring": "sigmoid",
        "n_group": file.integer("n_group", 1 if "n_group" in file.fields else 8),
        "topk_group": file.integer("topk_group", 1 if "topk_group" in file.fields else 4),
        "norm_topk_prob": file.flag("norm_topk_prob", True),
        "routed_scaling_factor": file.number("routed_scaling_factor", 2.5),
    }


def _v2_gate(file: ConfigFile, top_k: int) -> dict[str, Any]:
    file.only("scoring_func", "softmax")
    file.only("topk_method", "greedy", "group_limited_greedy")
    grouped = file.take("topk_method", str, "greedy") == "group_limited_greedy"
    # DeepSeek-V2's own code either normalises the weights or scales them; transformers never normalises. The
    # published checkpoints all say norm_topk_prob = false, where both agree.
    normalise = file.flag("norm_topk_prob", False) and top_k > 1
    return {
        "scoring": "softmax",
        "n_group": file.integer("n_group", 1) if grouped else 1,
        "topk_group": file.integer("topk_group", 1) if grouped else 1,
        "norm_topk_prob": normalise,
        "routed_scaling_factor": 1.0 if normalise else file.number("routed_scaling_factor", 1.0),
    }


def _rope_config(file: ConfigFile) -> RopeConfig:
    """Both spellings: rope_parameters (with rope_theta inside), or rope_scaling beside rope_theta."""
    spelling = "rope_parameters" if file.fields.get("rope_parameters") is not None else "rope_scaling"
    rope = file.section(spelling)
    theta = rope.number("rope_theta", file.number("rope_theta", 10000.0))
    kind = rope.take("rope_type", str, None) or rope.take("type", str, "default")
    if kind == "default":
        return rope.build(RopeConfig, theta=theta)
    if kind != "yarn":
        raise ValueError(f"{file.path}: {spelling}: type {kind!r} is not supported; supported: 'default', 'yarn'")
    max_positions = file.size("max_position_embeddings")
    original = rope.number("original_max_position_embeddings", max_positions)
    optional = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor")
    return rope.build(
        RopeConfig,
        theta=theta,
        kind=kind,
        factor=rope.number("factor", max_positions / max(original, 1)),
        original_max_position_embeddings=original,
        truncate=rope.flag("truncate", True),
        **{name: rope.number(name) for name in optional if rope.fields.get(name) is not None},
    )
