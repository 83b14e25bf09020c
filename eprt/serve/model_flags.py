"""Whether the flags fit the model, as far as its config.json tells: said before anything is started.

Loads no torch. The ranks check the same again, and more, when they read the model. Knows nothing of what flags do.
"""

import argparse
from math import gcd, lcm
from pathlib import Path

from eprt.models.config_file import ConfigFile
from eprt.models.model_types import take_model_type, take_quant_method
from eprt.serve.options import OptionError

_FP8_BLOCK = 128  # rows and columns of fp8 weights that share a scale
_V4_PAGE_SIZES = (None, 16, 64, 256)  # 16 and 64: what other models have by default, on CPUs and on GPUs


def check_flags_of_model(args: argparse.Namespace, model_dir: Path) -> None:
    """OptionError with one line that names flag, value and remedy, or the wrong field of config.json."""
    try:
        _check(args, ConfigFile(model_dir / "config.json"))
    except OptionError:
        raise
    except ValueError as error:
        raise OptionError(f"--model {error}") from None


def _check(args: argparse.Namespace, file: ConfigFile) -> None:
    model_type, quant_method = take_model_type(file), take_quant_method(file)
    is_v4 = model_type == "deepseek_v4"
    if args.num_hidden_layers is not None and args.num_hidden_layers > (most := file.size("num_hidden_layers")):
        raise OptionError(f"--num-hidden-layers {args.num_hidden_layers}: this model has {most}; must be in 1..{most}")
    if args.num_speculative_tokens and not file.integer("num_nextn_predict_layers", 0):
        raise OptionError(
            f"--num-speculative-tokens {args.num_speculative_tokens}: this model has no MTP layer to draft with "
            "(num_nextn_predict_layers is 0 in its config.json); leave it out"
        )
    if args.overlap in ("tbo", "sbo") and not is_v4 and not file.integer("n_routed_experts", 0):
        raise OptionError(
            f"--overlap {args.overlap}: this model has no MoE layer, so there is no communication to hide; leave it out"
        )
    if args.index_cache_dtype != "auto" and not is_v4:
        raise OptionError(
            f"--index-cache-dtype {args.index_cache_dtype}: only DeepSeek V4's indexer has such a cache; leave it out"
        )
    if is_v4:
        _check_v4(args)
    if is_v4 or model_type == "deepseek_v32":
        _check_no_teams(args, "V4" if is_v4 else "V3.2, whose attention has an indexer")
    if args.attention_tp > 1:
        _check_heads(args, file, quant_method)


def _check_v4(args: argparse.Namespace) -> None:
    if args.page_size not in _V4_PAGE_SIZES:
        raise OptionError(
            f"--page-size {args.page_size}: a page of DeepSeek V4's cache stands for {_V4_PAGE_SIZES[-1]} positions; "
            f"leave it out, or give {_V4_PAGE_SIZES[-1]}"
        )
    if args.device == "cpu":
        return
    if args.num_decode:
        raise OptionError(
            f"--decode {args.num_decode}: requests of DeepSeek V4 go from instance to instance on CPUs only so far; "
            "leave out --prefill and --decode, or give --device cpu"
        )
    if args.max_lost_ranks:
        raise OptionError(
            f"--max-lost-ranks {args.max_lost_ranks}: DeepSeek V4 goes on without lost ranks on CPUs only so far; "
            "leave it out, or give --device cpu"
        )
    if args.wire is not None:
        raise OptionError(
            f"--wire {args.wire}: DeepSeek V4 is served on the GPUs of one host only so far; leave it out, or give "
            "--device cpu"
        )


def _check_no_teams(args: argparse.Namespace, model: str) -> None:
    for flag, size, what in (
        ("--prompt-ranks", args.prompt_ranks, "one prompt"),
        ("--attention-tp", args.attention_tp, "attention"),
    ):
        if size > 1:
            raise OptionError(
                f"{flag} {size}: {what} over several ranks works with DeepSeek V2 and V3 so far, not with {model}; "
                "leave it out"
            )


def _check_heads(args: argparse.Namespace, file: ConfigFile, quant_method: str | None) -> None:
    """As layers/head_shares.py shares them."""
    size, num_heads, width = args.attention_tp, file.size("num_attention_heads"), file.size("hidden_size")
    together, columns = 1, width
    if quant_method == "fp8":
        together, columns = _heads_of_whole_blocks(file), -(-width // _FP8_BLOCK)
    if size > (most := -(-num_heads // together)):
        why = f", {together} of them inseparable, as they share blocks of fp8 weights" if together > 1 else ""
        raise OptionError(
            f"--attention-tp {size}: this model has {num_heads} heads{why}: must be in 1..{most}, so that each rank "
            "has some"
        )
    if args.attention_tp_form == "gather" and size > columns:
        raise OptionError(
            f"--attention-tp {size}: this model is {width} wide, in fp8 blocks of {_FP8_BLOCK}: too little for all "
            "ranks; take --attention-tp-form reduce, or fewer"
        )


def _heads_of_whole_blocks(file: ConfigFile) -> int:
    """The least number of heads whose rows of q and of kv_b, and whose columns of o, are whole blocks."""
    nope, rope, v = (file.size(name) for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    return lcm(*(_FP8_BLOCK // gcd(_FP8_BLOCK, width) for width in (nope + rope, nope + v, v)))
