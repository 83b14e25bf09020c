"""DeepSeek V4 from files as published: fp8 with e8m0 scales, fp4 and fp8 experts; and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from eprt import EngineConfig, EPGroup
from eprt.engine.memory_plan import MemoryPlan
from eprt.models.checkpoint import CheckpointError
from eprt.models.hf_config import read_model_config
from eprt.models.loader import load_model
from tests import tiny_v4
from tests.paged_v4 import HybridRunner

TOKENS = torch.randint(2, 128, (300,), generator=torch.Generator().manual_seed(1))
FEW_LAYERS = {"num_hidden_layers": 3, "compress_ratios": [0, 4, 128], "num_hash_layers": 1}


def load(directory: Path, **options: Any) -> Any:
    return load_model(EngineConfig(str(directory), chunk_size=1024, **options), EPGroup.single())


@pytest.fixture
def directory(tmp_path):
    return tiny_v4.save(tiny_v4.make_model(**FEW_LAYERS), tmp_path)


@pytest.mark.parametrize("expert_dtype", ["fp4", "fp8"])
def test_published_formats_compute_what_their_values_mean(directory, expert_dtype):
    meaning = tiny_v4.quantise(directory, expert_dtype)
    model = load(directory)
    stored = {layer.mlp.pool.w13.data.dtype for layer in model.layers}
    assert stored == {torch.uint8 if expert_dtype == "fp4" else torch.float8_e4m3fn}
    assert all(layer.attention.weights.o_b.weight.data.dtype == torch.float8_e4m3fn for layer in model.layers)
    golden = tiny_v4.make_model(**FEW_LAYERS)
    tiny_v4.assign(golden, meaning)
    with torch.no_grad():
        want = golden(TOKENS[None], use_cache=False).logits[0].log_softmax(-1)
    assert (HybridRunner(model).log_probs(TOKENS) - want).abs().max() < 1e-4


def test_fp4_experts_take_four_bits_and_their_scales(directory):
    plain = MemoryPlan.for_rank(EngineConfig(str(directory), spare_experts=0), 1)
    tiny_v4.quantise(directory, "fp4")
    quantised = MemoryPlan.for_rank(EngineConfig(str(directory), spare_experts=0), 1)
    values = 3 * 8 * 3 * 64 * 32
    assert (plain.experts, quantised.experts) == (values * 4, values // 2 + values // 32)
    assert quantised.dense < plain.dense


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
@pytest.mark.parametrize("formats", ["plain", "fp4"])
def test_the_memory_plan_is_what_weights_take(directory, formats, load_format):
    if formats == "fp4":
        tiny_v4.quantise(directory, "fp4")
    options = {"load_format": load_format}
    plan, model = MemoryPlan.for_rank(EngineConfig(str(directory), **options), 1), load(directory, **options)
    seen: dict[int, int] = {}
    collect_bytes(model, seen, set())
    pools = {id(moe.pool): moe.pool for moe in model.moe_layers()}
    assert plan.experts == sum(part.nbytes for pool in pools.values() for part in pool.parts)
    assert plan.dense == pytest.approx(sum(seen.values()) - plan.experts, rel=0.05)


def collect_bytes(thing: Any, seen: dict[int, int], visited: set[int]) -> None:
    """Of all tensors that a model's objects hold, by address."""
    if id(thing) in visited:
        return
    visited.add(id(thing))
    if isinstance(thing, torch.Tensor):
        seen[thing.untyped_storage().data_ptr()] = thing.untyped_storage().nbytes()
    elif isinstance(thing, dict):
        for each in thing.values():
            collect_bytes(each, seen, visited)
    elif isinstance(thing, (list, tuple, set)):
        for each in thing:
            collect_bytes(each, seen, visited)
    elif type(thing).__module__.startswith(("eprt.models", "eprt.layers", "eprt.ops.weight", "eprt.ops.streams")):
        names = {**vars(thing)} if "__dict__" in dir(thing) else {}
        for each in names.values():
            collect_bytes(each, seen, visited)


def edit_config(directory: Path, **fields: Any) -> None:
    path = directory / "config.json"
    config = {**json.loads(path.read_text()), **fields}
    path.write_text(json.dumps({name: value for name, value in config.items() if value is not ...}))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"engram_layers": [1]},
            r"engram_layers is a field of DeepSeek V4.1. DeepSeek V4.1's Engram is not implemented",
        ),
        ({"model_type": "deepseek_v41"}, r"'deepseek_v41' is not supported; DeepSeek V4.1's Engram"),
        ({"model_type": "deepseek_v4_1"}, r"'deepseek_v4_1' is not supported; DeepSeek V4.1's Engram"),
        ({"compress_ratios": [0, 4]}, r"compress_ratios=\[0, 4\]: must be 3 numbers"),
        ({"compress_ratios": [0, 4, 8]}, r"compress_ratios=\[0, 4, 8\]: each must be 0, 4 or 128"),
        ({"compress_ratios": [0, 4, 128, 4]}, r"the last one, of the MTP layer, must be 0"),
        ({"sliding_window": 64}, r"sliding_window=64: must be 128"),
        ({"expert_dtype": "nvfp4"}, r"expert_dtype='nvfp4' is not supported, only 'fp4', 'fp8'"),
        ({"scoring_func": "sigmoid"}, r"scoring_func='sigmoid' is not supported"),
        ({"q_lora_rank": None}, r"field 'q_lora_rank' is missing"),
    ],
)
def test_other_configurations_are_refused(directory, fields, message):
    edit_config(directory, **fields)
    with pytest.raises(ValueError, match=message):
        load(directory)


def test_pages_are_of_256_positions_on_every_device(directory):
    for device in ("cpu", "cuda"):
        with pytest.raises(ValueError, match=r"--page-size 32: .* 256 positions; leave it out, or give 256"):
            read_model_config(EngineConfig(str(directory), device=device, page_size=32))
        read_model_config(EngineConfig(str(directory), device=device))
    load(directory, page_size=256)


def test_another_drafter_is_named_and_the_model_served(tmp_path, caplog):
    model = tiny_v4.make_model(**FEW_LAYERS)
    more = {"mtp.0.markov.weight": torch.ones(2), "mtp.2.enorm.weight": torch.ones(64)}
    directory = tiny_v4.save(model, tmp_path, more=more, num_nextn_predict_layers=1, dspark_block_size=4)
    assert HybridRunner(load(directory)).log_probs(TOKENS[:5]).shape == (5, 128)
    assert "the checkpoint's drafter is DSpark, which is not implemented: served without drafts" in caplog.text
    with pytest.raises(CheckpointError, match=r"its drafter is DSpark, .*leave --num-speculative-tokens at 0"):
        load(directory, num_speculative_tokens=1)


def test_missing_and_foreign_tensors_are_listed(tmp_path):
    model = tiny_v4.make_model(**FEW_LAYERS)
    directory = tiny_v4.save(model, tmp_path, more={"layers.1.attn.wkv_b.weight": torch.ones(2, 2)})
    with pytest.raises(CheckpointError, match=r"extra: layers.1.attn.wkv_b.weight \[2, 2\]"):
        load(directory)
    with pytest.raises(CheckpointError, match=r"no MTP layer to draft with \(num_nextn_predict_layers is 0"):
        load(directory, num_speculative_tokens=1)


def test_transformers_spelling_of_the_configuration_is_read_too(directory):
    edit_config(
        directory,
        compress_ratios=...,
        num_hash_layers=...,
        rope_scaling=...,
        rope_theta=...,
        compress_rope_theta=...,
        qk_rope_head_dim=...,
        layer_types=["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
        mlp_layer_types=["hash_moe", "moe", "moe"],
        partial_rotary_factor=0.25,
        rope_parameters={
            "main": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
            "compress": {**tiny_v4.YARN, "rope_theta": 160000.0, "attention_factor": 1.0},
        },
    )
    golden = tiny_v4.make_model(**FEW_LAYERS)
    with torch.no_grad():
        want = golden(TOKENS[None], use_cache=False).logits[0].log_softmax(-1)
    assert (HybridRunner(load(directory)).log_probs(TOKENS) - want).abs().max() < 1e-4


@pytest.mark.parametrize("formats", ["plain", "fp4"])
def test_dummy_weights_compute_finite_numbers(directory, formats):
    if formats == "fp4":
        tiny_v4.quantise(directory, "fp4")
    model = load(directory, load_format="dummy", num_hidden_layers=2)
    assert (model.layers[0].mlp.pool.w13.data.dtype == torch.uint8) == (formats == "fp4")
    assert HybridRunner(model).log_probs(TOKENS).isfinite().all()
