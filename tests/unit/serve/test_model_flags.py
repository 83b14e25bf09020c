"""Flags that the model does not allow are refused before anything starts, as the ranks would refuse them later."""

import json
import random
from pathlib import Path

import pytest

from eprt.config import EngineConfig
from eprt.layers.head_shares import HeadShares
from eprt.models.hf_config import read_model_config
from eprt.serve.flags import parse_options
from eprt.serve.options import OptionError
from tests.paths import DEMO, DEMO_V4

FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}


def write_config(folder: Path, **changes) -> str:
    """The demo model's, with changes; None takes a field away."""
    fields = {**json.loads(Path(DEMO, "config.json").read_text()), **changes}
    kept = {name: value for name, value in fields.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(kept))
    return str(folder)


def refusal(model_dir: str, *flags: str) -> str:
    """ "": taken."""
    try:
        parse_options(["--model", model_dir, "--skip-tokenizer-init", *flags])
    except OptionError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    "model, flags, words",
    [
        (
            DEMO_V4,
            ["-n", "2", "--attention-tp", "2"],
            "--attention-tp 2: attention over several .* not with V4; leave",
        ),
        (
            DEMO_V4,
            ["-n", "2", "--prompt-ranks", "2"],
            "--prompt-ranks 2: one prompt over .* not with V4; leave",
        ),
        (DEMO_V4, ["--page-size", "32"], "--page-size 32: .* stands for 256 positions; leave it out, or give 256"),
        (
            DEMO_V4,
            ["-n", "2", "--device", "cuda", "--max-lost-ranks", "1"],
            "--max-lost-ranks 1: DeepSeek V4 goes on without lost ranks on CPUs only so far; leave it out, or give",
        ),
        (
            DEMO_V4,
            ["-n", "2", "--device", "cuda", "--wire", "nvshmem"],
            "--wire nvshmem: DeepSeek V4 is served on the GPUs of one host only so far; leave it out, or give",
        ),
        (
            DEMO_V4,
            ["--prefill", "1", "--decode", "1", "--device", "cuda"],
            "--decode 1: requests of DeepSeek V4 go from instance to instance on CPUs only so far; leave out",
        ),
        (DEMO, ["--index-cache-dtype", "fp4"], "--index-cache-dtype fp4: only DeepSeek V4's indexer has such a cache"),
        (DEMO, ["-n", "8", "--attention-tp", "8"], r"--attention-tp 8: this model has 4 heads: must be in 1\.\.4"),
        (
            DEMO,
            ["--load-format", "dummy", "--num-hidden-layers", "9"],
            r"--num-hidden-layers 9: this model has 4; must be in 1\.\.4",
        ),
    ],
)
def test_what_the_model_does_not_allow_is_one_line(model, flags, words):
    with pytest.raises(OptionError, match=words) as caught:
        parse_options(["--model", model, *flags])
    assert "\n" not in str(caught.value)


def test_what_the_model_allows_is_taken():
    assert refusal(DEMO_V4, "--device", "cuda", "--num-speculative-tokens", "2", "--kv-cache-dtype", "fp8") == ""
    assert refusal(DEMO_V4, "-n", "2", "--max-lost-ranks", "1") == ""
    assert refusal(DEMO_V4, "--page-size", "256", "--index-cache-dtype", "fp4", "--overlap", "tbo") == ""
    assert refusal(DEMO, "-n", "4", "--attention-tp", "4", "--num-speculative-tokens", "2") == ""


@pytest.mark.parametrize(
    "changes, flags, words",
    [
        ({"num_nextn_predict_layers": 0}, ["--num-speculative-tokens", "1"], "has no MTP layer to draft with"),
        ({"num_nextn_predict_layers": "x"}, ["--num-speculative-tokens", "1"], "num_nextn_predict_layers='x' has the"),
        ({"n_routed_experts": None}, ["--overlap", "tbo"], "--overlap tbo: this model has no MoE layer"),
        ({"model_type": "deepseek_v32"}, ["-n", "2", "--attention-tp", "2"], "not with V3.2, whose attention has"),
        ({"model_type": "deepseek_v32"}, ["-n", "2", "--prompt-ranks", "2"], "not with V3.2, whose attention has"),
    ],
)
def test_fields_of_the_model_that_flags_need(changes, flags, words, tmp_path):
    directory = write_config(tmp_path, **changes)
    assert words in refusal(directory, *flags) and refusal(directory) == ""


def test_heads_are_refused_exactly_where_ranks_refuse_them(tmp_path):
    """Random shapes beside HeadShares, which the ranks ask."""
    draw, num_refused = random.Random(5), 0
    for _ in range(60):
        heads, size = draw.choice([1, 2, 3, 4, 6, 8, 16]), draw.choice([2, 3, 4, 7, 16])
        form, fp8 = draw.choice(["gather", "reduce"]), draw.random() < 0.6
        widths = {name: draw.choice([32, 64, 96, 128, 192]) for name in ("qk_nope_head_dim", "v_head_dim")}
        changes = {"num_attention_heads": heads, "num_key_value_heads": heads, "qk_rope_head_dim": 64, **widths}
        changes |= {"hidden_size": draw.choice([128, 256, 384, 512]), "quantization_config": FP8 if fp8 else None}
        directory = write_config(tmp_path, **changes)
        engine = EngineConfig(directory, attention_tp=size, attention_tp_form=form)
        try:
            HeadShares.for_config(engine, read_model_config(engine))
            why = ""
        except ValueError as error:
            why = str(error)
        told = refusal(directory, "-n", str(size), "--attention-tp", str(size), "--attention-tp-form", form)
        assert told == why, (changes, size, form)
        num_refused += bool(why)
    assert 10 <= num_refused <= 50
