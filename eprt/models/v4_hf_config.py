"""config.json of DeepSeek V4 -> ModelConfig: DeepSeek's spelling of the fields, and transformers' own.

Knows nothing of tensors.
"""

from typing import Any

import torch

from eprt.config import EngineConfig, ModelConfig, MoEConfig, RopeConfig, V4Config
from eprt.layers.hybrid_cache import PAGE_TOKENS
from eprt.models.config_file import ConfigFile
from eprt.models.generation_config import open_generation_config
from eprt.models.hf_fields import take_dtype, take_eos_token_ids, take_num_layers
from eprt.models.model_types import take_quant_method

# transformers' names of layers -> DeepSeek's compress_ratios.
_RATIOS = {"sliding_attention": 0, "compressed_sparse_attention": 4, "heavily_compressed_attention": 128}
_DEFAULT_PAGE_SIZES = 16, 64  # of other models on CPUs and on GPUs: what EngineConfig has where nothing was given
_DRAFTERS = {"dspark": "DSpark"}  # what names of fields begin with -> the drafter that these belong to


def read_v4_config(file: ConfigFile, engine: EngineConfig) -> ModelConfig:
    """ValueError names the file, the field and the value."""
    _check_fields(file, engine)
    dtype, num_layers = take_dtype(file, engine.dtype), take_num_layers(file, engine)
    head_dim, rope_dim = file.size("head_dim"), _rope_dim(file)
    main, compress = _ropes(file)
    return file.build(
        ModelConfig,
        model_type="deepseek_v4",
        vocab_size=file.size("vocab_size"),
        hidden_size=file.size("hidden_size"),
        intermediate_size=file.size("moe_intermediate_size"),
        num_hidden_layers=num_layers,
        num_attention_heads=file.size("num_attention_heads"),
        q_lora_rank=file.size("q_lora_rank"),
        kv_lora_rank=head_dim - rope_dim,
        qk_nope_head_dim=head_dim - rope_dim,
        qk_rope_head_dim=rope_dim,
        v_head_dim=head_dim,
        first_k_dense_replace=0,
        moe=_moe_config(file, engine, dtype),
        dtype=dtype,
        rope=compress,
        rms_norm_eps=file.number("rms_norm_eps", 1e-6),
        max_position_embeddings=file.size("max_position_embeddings"),
        num_nextn_predict_layers=file.integer("num_nextn_predict_layers", 0),
        bos_token_id=file.take("bos_token_id", int, None),
        eos_token_ids=take_eos_token_ids(file, open_generation_config(engine)),
        quant_method=take_quant_method(file),
        v4=_v4_config(file, num_layers, main),
    )


def _check_fields(file: ConfigFile, engine: EngineConfig) -> None:
    file.only("hidden_act", "silu")
    file.only("mlp_bias", False)
    file.only("attention_bias", False)
    file.only("tie_word_embeddings", False)
    file.only("num_key_value_heads", 1)
    file.only("scoring_func", "sqrtsoftplus")
    file.only("topk_method", "noaux_tc")
    file.only("norm_topk_prob", True)
    file.only("expert_dtype", "fp4", "fp8")
    if engine.page_size not in (*_DEFAULT_PAGE_SIZES, PAGE_TOKENS):
        raise ValueError(
            f"--page-size {engine.page_size}: a page of DeepSeek V4's cache stands for {PAGE_TOKENS} positions; leave "
            f"it out, or give {PAGE_TOKENS}"
        )


def _rope_dim(file: ConfigFile) -> int:
    given = file.size("qk_rope_head_dim", None)
    factor = file.fields.get("partial_rotary_factor")
    if given is None and factor is None:
        parameters = file.section("rope_parameters")
        factor = parameters.section("compress").take("partial_rotary_factor", (int, float), None)
    if given is None and factor is None:
        raise ValueError(f"{file.where}: field 'qk_rope_head_dim' is missing")
    return given if factor is None or given is not None else round(file.size("head_dim") * factor)


def _moe_config(file: ConfigFile, engine: EngineConfig, dtype: torch.dtype) -> MoEConfig:
    intermediate_size = file.size("moe_intermediate_size")
    return file.build(
        MoEConfig,
        hidden_size=file.size("hidden_size"),
        intermediate_size=intermediate_size,
        num_experts=file.size("n_routed_experts"),
        top_k=file.size("num_experts_per_tok"),
        shared_intermediate_size=file.integer("n_shared_experts", 1) * intermediate_size,
        scoring="sqrtsoftplus",
        routed_scaling_factor=file.number("routed_scaling_factor", 1.5),
        num_max_tokens_per_rank=max(engine.chunk_size, engine.max_num_seqs),
        payload=engine.ep_payload,
        weight_format=engine.quantization or "same",
        swiglu_limit=file.number("swiglu_limit", 10.0),
        dtype=dtype,
    )


def _v4_config(file: ConfigFile, num_layers: int, window_rope: RopeConfig) -> V4Config:
    quantised = file.section("quantization_config")
    drafter = next((_DRAFTERS[name.split("_")[0]] for name in file.fields if name.split("_")[0] in _DRAFTERS), "")
    return file.build(
        V4Config,
        compress_ratios=_compress_ratios(file, num_layers),
        window_rope=window_rope,
        o_groups=file.size("o_groups"),
        o_lora_rank=file.size("o_lora_rank"),
        index_n_heads=file.size("index_n_heads"),
        index_head_dim=file.size("index_head_dim"),
        index_topk=file.size("index_topk"),
        sliding_window=file.size("sliding_window", 128),
        hc_mult=file.size("hc_mult", 4),
        hc_sinkhorn_iters=file.size("hc_sinkhorn_iters", 20),
        hc_eps=file.number("hc_eps", 1e-6),
        num_hash_layers=min(_num_hash_layers(file), num_layers),
        expert_dtype=file.take("expert_dtype", str, None) or quantised.take("expert_dtype", str, "fp8"),
        drafter=drafter,
    )


def _compress_ratios(file: ConfigFile, num_layers: int) -> tuple[int, ...]:
    """Of the model's layers: the list may have one more, of the MTP layer."""
    ratios, kinds = file.take("compress_ratios", list, None), file.take("layer_types", list, None)
    if ratios is None:
        unknown = [kind for kind in kinds or () if kind not in _RATIOS]
        if kinds is None or unknown:
            raise ValueError(f"{file.where}: layer_types={kinds}: must be of {', '.join(_RATIOS)}, or compress_ratios")
        rates = file.section("compress_rates")
        for kind, ratio in _RATIOS.items():
            rates.only(kind, ratio)
        ratios = [_RATIOS[kind] for kind in kinds]
    all_layers = file.size("num_hidden_layers")
    if len(ratios) not in (all_layers, all_layers + 1) or not all(type(ratio) is int for ratio in ratios):
        raise ValueError(
            f"{file.where}: compress_ratios={ratios}: must be {all_layers} numbers, one for each layer, or one more "
            "for the MTP layer"
        )
    if len(ratios) > all_layers and ratios[-1]:
        raise ValueError(f"{file.where}: compress_ratios={ratios}: the last one, of the MTP layer, must be 0")
    return tuple(ratios[:num_layers])


def _num_hash_layers(file: ConfigFile) -> int:
    kinds = file.take("mlp_layer_types", list, None)
    if kinds is None:
        return file.integer("num_hash_layers", 3)
    num_hash = kinds.count("hash_moe")
    if kinds != ["hash_moe"] * num_hash + ["moe"] * (len(kinds) - num_hash):
        raise ValueError(f"{file.where}: mlp_layer_types={kinds}: must be 'hash_moe' layers, then 'moe' layers")
    return num_hash


def _ropes(file: ConfigFile) -> tuple[RopeConfig, RopeConfig]:
    """Of layers with a window alone, and of layers that compress: YaRN there, cos and sin not scaled."""
    nested = file.section("rope_parameters")
    if isinstance(nested.fields.get("compress"), dict):
        main, compress = (nested.section(name) for name in ("main", "compress"))
        return _rope(main, main.number("rope_theta")), _rope(compress, compress.number("rope_theta"))
    main = file.build(RopeConfig, theta=file.number("rope_theta", 10000.0))
    scaling = "rope_parameters" if nested.fields else "rope_scaling"
    return main, _rope(file.section(scaling), file.number("compress_rope_theta", 160000.0))


def _rope(section: ConfigFile, theta: float) -> RopeConfig:
    kind = section.take("rope_type", str, None) or section.take("type", str, "default")
    if kind == "default":
        return section.build(RopeConfig, theta=theta)
    if kind != "yarn":
        raise ValueError(f"{section.where}: type {kind!r} is not supported; supported: 'default', 'yarn'")
    optional: dict[str, Any] = {
        name: section.number(name) for name in ("beta_fast", "beta_slow") if section.fields.get(name) is not None
    }
    return section.build(
        RopeConfig,
        theta=theta,
        kind=kind,
        factor=section.number("factor"),
        original_max_position_embeddings=section.number("original_max_position_embeddings"),
        attention_factor=1.0,
        truncate=section.flag("truncate", True),
        **optional,
    )
