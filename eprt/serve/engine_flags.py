"""Flags of the engine, declared once for `eprt serve` and `eprt generate`.

A flag is a field of EngineConfig and takes its default and its type from there. Knows nothing of flags that only one
program has.
"""

import argparse
from dataclasses import fields
from typing import Any

from eprt.bind import DEFAULT_POLICY
from eprt.config import EngineConfig

# field: placeholder of the value (None: the flag's own name), help
_FLAGS: dict[str, tuple[str | None, str]] = {
    "dtype": (None, "auto (the checkpoint's, default), float32 or bfloat16"),
    "load_format": ("HOW", "auto (the files, default) or dummy (random weights)"),
    "num_hidden_layers": ("K", "fewer layers than the model's, with dummy weights only"),
    "quantization": ("HOW", "int8: quantise the weights of layers at load; default: as they are"),
    "device": (None, "cpu, cuda (a GPU for each rank) or auto; default %(default)s"),
    "prompt_ranks": (
        "N",
        "ranks of one host that compute each other's prompts, a part of the tokens each: the first token comes sooner "
        "while some have nothing to do; default %(default)s: each its own (docs/prompt-ranks.md)",
    ),
    "attention_tp": (
        "N",
        "CPU ranks that share attention, each for heads of its own, whose weights it alone reads; default %(default)s: "
        "each its own requests (docs/attention-tp.md)",
    ),
    "attention_tp_form": (
        "HOW",
        "gather (default: answers are, to the bit, those of --attention-tp 1) or reduce (one wait less in each layer, "
        "other last bits)",
    ),
    "ep_payload": ("WHAT", "what dispatch sends: same (the dtype, default) or fp8"),
    "num_redundant_experts": ("N", "slots for replicas in each MoE layer, over all ranks; default %(default)s"),
    "spare_experts": (
        "N",
        "experts for which each rank keeps spare memory while experts move, default %(default)s; 0: they cannot move",
    ),
    "expert_host_copies": (
        "HOW",
        "where experts of a lost rank come from: off (the checkpoint, default) or node (one copy per host in memory "
        "that its ranks share)",
    ),
    "replica_routing": (
        "HOW",
        "which replica a token takes: weights (the plan's, default), local (nearest first, in the same proportion), "
        "batch or batch-lp (split again in each step: evenly first, then locally)",
    ),
    "exact_combine": (None, "on GPUs: no bit of an answer depends on where experts are; sends more between GPUs"),
    "max_model_len": ("N", "most tokens of prompt and completion together; default: the model's"),
    "kv_cache_gb": ("GB", "memory of each rank's KV cache (2**30 bytes), default: by --memory-fraction"),
    "memory_fraction": (
        "F",
        "fraction of a rank's share of the host's memory, or of its GPU's, for weights, KV cache and buffers; default "
        "0.5 of a host's, 0.8 of a GPU's",
    ),
    "kv_cache_dtype": ("TYPE", "auto (the model's, default), bf16 or fp8, which holds 1.75 times the tokens of bf16"),
    "index_cache_dtype": (
        "TYPE",
        "keys of DeepSeek V4's indexer: auto (as --kv-cache-dtype, default) or fp4, half of fp8",
    ),
    "page_size": ("N", "tokens per KV page, default 16, with --device cuda or auto 64"),
    "max_num_seqs": ("N", "sequences that run at once, default %(default)s"),
    "max_queue": ("N", "sequences that wait; further ones get 429, default %(default)s"),
    "chunk_size": ("N", "most tokens of one step, default %(default)s"),
    "seed": ("N", "random seed for requests without a seed, default %(default)s"),
    "generation_config": (
        "WHERE",
        "sampling defaults and further EOS tokens: auto (the model's generation_config.json, default), none, or a "
        "directory with such a file",
    ),
    "num_speculative_tokens": (
        "K",
        "tokens that the checkpoint's MTP layer drafts per request and step, default %(default)s",
    ),
    "speculative_acceptance": (
        "HOW",
        "exact: drafts never change an answer; rejection: accepts more drafts of requests with a temperature, whose "
        "answers follow the same distribution; default %(default)s",
    ),
    "low_latency_max_tokens": (
        "N",
        "decoding steps of up to N tokens on each rank use the low-latency exchange, default %(default)s",
    ),
    "overlap": (
        "HOW",
        "what is computed while tokens travel: none, tbo (two half batches in turn), sbo (decodes: the shared "
        "expert), auto (default: sbo between GPUs; docs/overlap.md)",
    ),
    "overlap_sms": (
        "N",
        "sbo: SMs of a GPU that send outputs beside the experts, for slow links; default: as many as pay",
    ),
    "overlap_schedule": (None, "prepare each step while the previous one computes; default: on GPUs, without drafts"),
}
_FIELDS = {field.name: field for field in fields(EngineConfig)}
_TYPES = {"int": int, "float": float, "str": str}


def add_engine_flags(group: argparse._ActionsContainer, *names: str) -> None:
    """Adds the flags of these fields of EngineConfig."""
    for name in names:
        flag, field, (placeholder, text) = "--" + name.replace("_", "-"), _FIELDS[name], _FLAGS[name]
        kind, _, or_none = str(field.type).partition(" | ")
        if kind == "bool":
            group.add_argument(flag, action=argparse.BooleanOptionalAction if or_none else "store_true", help=text)
        else:
            group.add_argument(flag, type=_TYPES[kind], default=field.default, metavar=placeholder, help=text)


def add_model_flag(group: argparse._ActionsContainer) -> None:
    text = (
        "Hugging Face directory (config.json, safetensors, tokenizer.json), or ORG/NAME that `hf download` has fetched"
    )
    group.add_argument("--model", dest="model_dir", required=True, metavar="DIR", help=text)


def add_bind_flag(group: argparse._ActionsContainer) -> None:
    text = "pin each rank to its share of the machine: core (default), numa or none"
    group.add_argument("--bind", default=DEFAULT_POLICY, metavar="HOW", help=text)


def engine_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """EngineConfig's fields that the program has flags for, as they were given."""
    return {name: value for name, value in vars(arguments).items() if name in _FIELDS}
