"""Checkpoints laid out as the hub's DeepSeek releases are: their file names, tensor names, configs and tokenizers, with
random weights of scaled-down shapes.

What each release's config.json and tokenizer_config.json say was read from public copies of these files. Tensor names
are written here a second time, so that the loader's own list is checked. Knows nothing of how eprt reads them.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
USER, ASSISTANT = "<｜User｜>", "<｜Assistant｜>"
_BLOCK = 128

_SHARED: dict[str, Any] = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "ep_size": 1,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "moe_layer_freq": 1,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "max_position_embeddings": 163840,
}
_YARN = {"beta_fast": 32, "beta_slow": 1, "factor": 40, "original_max_position_embeddings": 4096, "type": "yarn"}


def _auto_map(version: str) -> dict[str, str]:
    kinds = (("AutoConfig", "configuration", "Config"), ("AutoModel", "modeling", "Model"))
    kinds += (("AutoModelForCausalLM", "modeling", "ForCausalLM"),)
    return {auto: f"{module}_deepseek.Deepseek{version}{name}" for auto, module, name in kinds}


V2_LITE: dict[str, Any] = {
    **_SHARED,
    "architectures": ["DeepseekV2ForCausalLM"],
    "auto_map": _auto_map("V2"),
    "aux_loss_alpha": 0.001,
    "bos_token_id": 100000,
    "eos_token_id": 100001,
    "first_k_dense_replace": 1,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "kv_lora_rank": 512,
    "model_type": "deepseek_v2",
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 27,
    "num_key_value_heads": 16,
    "pretraining_tp": 1,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rope_scaling": {**_YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "seq_aux": True,
    "topk_group": 1,
    "topk_method": "greedy",
    "transformers_version": "4.33.1",
    "v_head_dim": 128,
    "vocab_size": 102400,
}
V2: dict[str, Any] = {
    **V2_LITE,
    "hidden_size": 5120,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "n_group": 8,
    "n_routed_experts": 160,
    "num_attention_heads": 128,
    "num_hidden_layers": 60,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "routed_scaling_factor": 16.0,
    "topk_group": 3,
    "topk_method": "group_limited_greedy",
    "transformers_version": "4.39.3",
}
V3: dict[str, Any] = {
    **_SHARED,
    "architectures": ["DeepseekV3ForCausalLM"],
    "auto_map": _auto_map("V3"),
    "bos_token_id": 0,
    "eos_token_id": 1,
    "first_k_dense_replace": 3,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [_BLOCK, _BLOCK],
    },
    "rope_scaling": {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "transformers_version": "4.46.3",
    "v_head_dim": 128,
    "vocab_size": 129280,
}
V32: dict[str, Any] = {
    **{name: value for name, value in V3.items() if name != "auto_map"},
    "architectures": ["DeepseekV32ForCausalLM"],
    "index_head_dim": 128,
    "index_n_heads": 64,
    "index_topk": 2048,
    "model_type": "deepseek_v32",
    "quantization_config": {**V3["quantization_config"], "scale_fmt": "ue8m0"},
}
# As transformers 5 saves V3.2 again: fields that its class does not know are gone, layers are listed one by one.
_NOT_RESAVED = ("quantization_config", "scoring_func", "topk_method", "moe_layer_freq", "ep_size", "torch_dtype")
_NOT_RESAVED += ("rope_scaling", "rope_theta", "num_nextn_predict_layers")
V32_RESAVED = {name: value for name, value in V32.items() if name not in _NOT_RESAVED} | {
    "dtype": "bfloat16",
    "head_dim": 64,
    "layer_types": ["indexed_attention"] * 61,
    "mlp_bias": False,
    "mlp_layer_types": ["dense"] * 3 + ["sparse"] * 58,
    "pad_token_id": None,
    "rope_parameters": {**V3["rope_scaling"], "rope_theta": 10000, "rope_type": "yarn"},
    "transformers_version": "5.23.0",
}
_UE8M0 = {**V3["quantization_config"], "scale_fmt": "ue8m0"}
# Converted by fp8_cast_bf16.py of DeepSeek's repository, which leaves config.json alone, ...
_BF16 = {name: value for name, value in V3.items() if name != "quantization_config"}
# ... or saved again by transformers 5.
_RESAVED = {name: value for name, value in V2_LITE.items() if name not in ("rope_scaling", "rope_theta", "torch_dtype")}
_RESAVED |= {
    "dtype": "bfloat16",
    "head_dim": 64,
    "mlp_bias": False,
    "pad_token_id": None,
    "rope_parameters": {**V2_LITE["rope_scaling"], "rope_theta": 10000, "rope_type": "yarn"},
    "transformers_version": "5.7.0",
}


@dataclass(frozen=True)
class Release:
    """How one repository of the hub looks."""

    config: dict[str, Any]  # config.json, in full size
    shards: int = 1  # files of the synthetic copy
    named_shards: int = 1  # files that their names speak of; 1: model.safetensors without an index
    # Where the chat template is: "tokenizer_config.json", "chat_template.jinja", "chat_template.json", or "" for base
    # models.
    template_in: str = "tokenizer_config.json"
    generation_config: dict[str, Any] = field(default_factory=dict)
    fp8: bool = False  # matrices in e4m3 with block scales
    power_of_two_scales: bool = False
    mtp: bool = False  # whether the files hold the MTP layer
    links: bool = False  # files are links into a blobs/ folder beside, as in the hub's cache

    @property
    def is_v3(self) -> bool:
        return self.config["model_type"] in ("deepseek_v3", "deepseek_v32")


_R1_SAMPLING = {"_from_model_config": True, "do_sample": True, "temperature": 0.6, "top_p": 0.95}
_V2_SAMPLING = {"do_sample": True, "temperature": 0.3, "top_p": 0.95, "bos_token_id": 100000, "eos_token_id": 100001}
_FP8 = {"shards": 3, "named_shards": 163, "fp8": True, "mtp": True}
RELEASES: dict[str, Release] = {
    "V2-Lite": Release(V2_LITE, 2, 4, template_in="", generation_config=_V2_SAMPLING),
    "V2-Lite-Chat": Release(V2_LITE, 2, 4, generation_config=_V2_SAMPLING, links=True),
    "V2-Lite-resaved": Release(_RESAVED, template_in="chat_template.jinja"),
    "V2": Release(V2, 2, 55, template_in=""),
    "V2-Chat": Release(V2, 2, 55, generation_config=_V2_SAMPLING),
    "V2.5": Release({**V2, "rope_scaling": {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0}}, 2, 55),
    "V3": Release(V3, **_FP8),
    "V3-0324": Release(V3, **_FP8, generation_config=_R1_SAMPLING),
    "R1": Release(V3, **_FP8, generation_config=_R1_SAMPLING, links=True),
    "R1-0528": Release(V3, **_FP8, generation_config=_R1_SAMPLING),
    "V3.1": Release(
        {**V3, "quantization_config": _UE8M0}, **_FP8, template_in="chat_template.jinja", power_of_two_scales=True
    ),
    "V3.1-Terminus": Release({**V3, "quantization_config": _UE8M0}, **_FP8, power_of_two_scales=True),
    "V3.2-Exp": Release(V32, **_FP8, power_of_two_scales=True),
    "V3.2": Release(V32, **_FP8, template_in="", power_of_two_scales=True, generation_config=_R1_SAMPLING),
    "V3.2-resaved": Release(V32_RESAVED, template_in="chat_template.jinja"),
    "V3-bf16": Release(_BF16, 3, 163, mtp=True),
    "V3-bf16-no-mtp": Release(_BF16, 3, 163, template_in="chat_template.json"),
    "V3-bf16-old-config": Release({**V3, "num_nextn_predict_layers": 0}, 3, 163, mtp=True),
}


def scaled_config(release: Release, num_layers: int | None = None) -> dict[str, Any]:
    """The release's config with narrower matrices, fewer experts and a smaller vocabulary; all other fields alike."""
    c = dict(release.config)
    c |= {"hidden_size": 192, "intermediate_size": 320, "moe_intermediate_size": 96, "kv_lora_rank": 64}
    c |= {"qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "vocab_size": 640}
    c |= {
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "n_routed_experts": 16,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    c["q_lora_rank"] = c["q_lora_rank"] and 48
    if "index_topk" in c:
        c |= {"index_head_dim": 32, "index_n_heads": 16, "index_topk": 8}
    c["num_hidden_layers"] = num_layers or c["num_hidden_layers"]
    return c


def make_release(name: str, folder: Path, num_layers: int | None = None) -> Path:
    """Writes the synthetic copy; num_layers: fewer than the release has."""
    release = RELEASES[name]
    folder.mkdir(parents=True, exist_ok=True)
    config = scaled_config(release, num_layers)
    _write_json(folder / "config.json", config)
    if release.generation_config:
        fields = {**release.generation_config, "bos_token_id": 0, "eos_token_id": 1}
        _write_json(folder / "generation_config.json", fields)
    _write_tokenizer(folder, release)
    _write_weights(folder, release, config)
    for extra in ("README.md", ".gitattributes", "LICENSE", "modeling_deepseek.py", "configuration_deepseek.py"):
        (folder / extra).write_text("raise SystemExit('nothing of a checkpoint is run')\n")
    (folder / "figures").mkdir()
    if release.links:
        _move_to_blobs(folder)
    return folder


def _write_json(path: Path, fields: dict[str, Any]) -> None:
    path.write_text(json.dumps(fields, indent=2, ensure_ascii=False))


# -- weights --


def tensor_shapes(c: dict[str, Any], mtp: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Every tensor of a release but the scales."""
    hidden, heads = c["hidden_size"], c["num_attention_heads"]
    yield "model.embed_tokens.weight", (c["vocab_size"], hidden)
    for layer in range(c["num_hidden_layers"] + mtp):
        p = f"model.layers.{layer}."
        if layer == c["num_hidden_layers"]:
            yield f"{p}embed_tokens.weight", (c["vocab_size"], hidden)
            yield f"{p}enorm.weight", (hidden,)
            yield f"{p}hnorm.weight", (hidden,)
            yield f"{p}eh_proj.weight", (hidden, 2 * hidden)
            yield f"{p}shared_head.norm.weight", (hidden,)
            yield f"{p}shared_head.head.weight", (c["vocab_size"], hidden)
        q_dim = heads * (c["qk_nope_head_dim"] + c["qk_rope_head_dim"])
        if c["q_lora_rank"] is None:
            yield f"{p}self_attn.q_proj.weight", (q_dim, hidden)
        else:
            yield f"{p}self_attn.q_a_proj.weight", (c["q_lora_rank"], hidden)
            yield f"{p}self_attn.q_a_layernorm.weight", (c["q_lora_rank"],)
            yield f"{p}self_attn.q_b_proj.weight", (q_dim, c["q_lora_rank"])
        yield f"{p}self_attn.kv_a_proj_with_mqa.weight", (c["kv_lora_rank"] + c["qk_rope_head_dim"], hidden)
        yield f"{p}self_attn.kv_a_layernorm.weight", (c["kv_lora_rank"],)
        kv_out = heads * (c["qk_nope_head_dim"] + c["v_head_dim"])
        yield f"{p}self_attn.kv_b_proj.weight", (kv_out, c["kv_lora_rank"])
        yield f"{p}self_attn.o_proj.weight", (hidden, heads * c["v_head_dim"])
        yield f"{p}input_layernorm.weight", (hidden,)
        yield f"{p}post_attention_layernorm.weight", (hidden,)
        if "index_topk" in c:
            indexer, size = f"{p}self_attn.indexer.", c["index_head_dim"]
            yield f"{indexer}wq_b.weight", (int(c["index_n_heads"]) * size, int(c["q_lora_rank"] or 0))
            yield f"{indexer}wk.weight", (size, hidden)
            yield f"{indexer}k_norm.weight", (size,)
            yield f"{indexer}k_norm.bias", (size,)
            yield f"{indexer}weights_proj.weight", (c["index_n_heads"], hidden)
        if layer < c["first_k_dense_replace"]:
            yield from _mlp(f"{p}mlp.", hidden, c["intermediate_size"])
            continue
        yield f"{p}mlp.gate.weight", (c["n_routed_experts"], hidden)
        if c.get("scoring_func", "sigmoid") == "sigmoid":
            yield f"{p}mlp.gate.e_score_correction_bias", (c["n_routed_experts"],)
        yield from _mlp(f"{p}mlp.shared_experts.", hidden, c["n_shared_experts"] * c["moe_intermediate_size"])
        for expert in range(c["n_routed_experts"]):
            yield from _mlp(f"{p}mlp.experts.{expert}.", hidden, c["moe_intermediate_size"])
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (c["vocab_size"], hidden)


def _mlp(prefix: str, hidden: int, width: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{prefix}gate_proj.weight", (width, hidden)
    yield f"{prefix}up_proj.weight", (width, hidden)
    yield f"{prefix}down_proj.weight", (hidden, width)


_FP8_MATRICES = ("_proj.weight", "_with_mqa.weight", "indexer.wq_b.weight", "indexer.wk.weight")
_NOT_FP8 = ("eh_proj.weight", "weights_proj.weight")


def _tensors(release: Release, c: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    torch.manual_seed(0)
    for name, shape in tensor_shapes(c, release.mtp):
        if name.endswith("norm.weight"):
            yield name, (1 + 0.1 * torch.randn(shape)).bfloat16()
        elif name.endswith("e_score_correction_bias"):
            yield name, 0.1 * torch.randn(shape)
        elif not release.fp8 or not name.endswith(_FP8_MATRICES) or name.endswith(_NOT_FP8):
            yield name, (torch.randn(shape) * shape[-1] ** -0.5).bfloat16()
        else:
            yield name, (32 * torch.randn(shape)).to(torch.float8_e4m3fn)
            blocks = [-(-size // _BLOCK) for size in shape]
            scale = torch.full(blocks, shape[-1] ** -0.5 / 32)
            yield f"{name}_scale_inv", scale.log2().ceil().exp2() if release.power_of_two_scales else scale


def _write_weights(folder: Path, release: Release, config: dict[str, Any]) -> None:
    tensors = list(_tensors(release, config))
    if release.named_shards == 1:
        save_file(dict(tensors), folder / "model.safetensors", metadata={"format": "pt"})
        return
    weight_map = {}
    per_file = -(-len(tensors) // release.shards)
    for shard in range(release.shards):
        part = dict(tensors[shard * per_file : (shard + 1) * per_file])
        file = f"model-{shard + 1:05d}-of-{release.named_shards:06d}.safetensors"
        save_file(part, folder / file)  # DeepSeek's own files have no metadata
        weight_map |= dict.fromkeys(part, file)
    _write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map})


def _move_to_blobs(folder: Path) -> None:
    blobs = folder.resolve().with_name(folder.name + "-blobs")
    blobs.mkdir()
    for number, path in enumerate(sorted(p for p in folder.iterdir() if p.is_file())):
        path.rename(blobs / f"{number:040x}")
        path.symlink_to(blobs / f"{number:040x}")


# -- tokenizer --

_TEMPLATE = (
    "{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}"
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'user' %}{{ '" + USER + "' + message['content'] }}{% endif %}"
    "{% if message['role'] == 'assistant' %}{{ '" + ASSISTANT + "' + message['content'] + eos_token }}{% endif %}"
    "{% if message['role'] == 'system' %}{{ message['content'] }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '" + ASSISTANT + "' }}{% endif %}"
)


def _added(content: str) -> dict[str, Any]:
    flags = {"lstrip": False, "normalized": True, "rstrip": False, "single_word": False}
    return {"__type": "AddedToken", "content": content, **flags}


def _write_tokenizer(folder: Path, release: Release) -> None:
    """Byte-level BPE behind the splits of the releases: V3 splits digits by three, V2 one by one. The model's
    vocabulary is larger than the tokenizer's, as in the releases."""
    tokenizer = Tokenizer(models.BPE())
    digits: Any = pre_tokenizers.Digits(individual_digits=True)
    if release.is_v3:
        digits = pre_tokenizers.Split(Regex(r"\p{N}{1,3}"), "isolated")
    words = pre_tokenizers.Split(Regex(r"\s?\p{L}+|\s?[!-/:-~！-／：-～‘-‟　-。]+|\s+$"), "isolated")
    cjk = pre_tokenizers.Split(Regex(r"[一-龥ࠀ-一가-퟿]+"), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, cjk, words, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    special = [AddedToken(text, special=True, normalized=False) for text in (BOS, EOS)]
    trainer = trainers.BpeTrainer(
        vocab_size=320, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=special
    )
    tokenizer.train_from_iterator(["What is the capital of France? 12 + 34 = 46. 漢字"] * 4, trainer)
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in (USER, ASSISTANT)])
    tokenizer.save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {
        "add_bos_token": True,
        "add_eos_token": False,
        "bos_token": _added(BOS),
        "eos_token": _added(EOS),
        "pad_token": _added(EOS),
        "clean_up_tokenization_spaces": False,
        "legacy": True,
        "model_max_length": 131072 if release.is_v3 else 16384,
        "sp_model_kwargs": {},
        "unk_token": None,
        "tokenizer_class": "LlamaTokenizerFast",
    }
    if release.template_in == "tokenizer_config.json":
        config["chat_template"] = _TEMPLATE
    elif release.template_in == "chat_template.json":
        _write_json(folder / "chat_template.json", {"chat_template": _TEMPLATE})
    elif release.template_in:
        (folder / release.template_in).write_text(_TEMPLATE)
    _write_json(folder / "tokenizer_config.json", config)
