"""What the loader accepts, and what it says when files or fields are wrong."""

import json
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from safetensors.torch import load_file, save_file

from eprt import EngineConfig, EPGroup
from eprt.models.checkpoint import Checkpoint, CheckpointError
from eprt.models.hf_config import read_model_config
from eprt.models.loader import load_model
from tests import tiny
from tests.paged import PagedRunner


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return tiny.save(tiny.make_variant("v3"), tmp_path_factory.mktemp("source"))


@pytest.fixture
def directory(source, tmp_path):
    """A copy to spoil."""
    for file in source.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def load(directory, progress=None, **options):
    return load_model(EngineConfig(str(directory), **options), EPGroup.single(), progress)


def edit_config(directory, **fields):
    path = directory / "config.json"
    config = {**json.loads(path.read_text()), **fields}
    path.write_text(json.dumps({name: value for name, value in config.items() if value != "remove"}))


def edit_tensors(directory, change: Callable[[dict], None]):
    path = directory / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


# -- config.json --


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"model_type": "llama"}, "model_type='llama' is not supported; supported: deepseek_v2, deepseek_v3"),
        ({"model_type": "deepseek_v41"}, "model_type='deepseek_v41' is not supported; DeepSeek V4.1's Engram"),
        ({"model_type": "remove"}, "field 'model_type' is missing"),
        ({"kv_lora_rank": "remove"}, "field 'kv_lora_rank' is missing"),
        ({"hidden_size": "64"}, "hidden_size='64' has the wrong type"),
        ({"num_attention_heads": True}, "num_attention_heads=True has the wrong type"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported, only 'silu'"),
        ({"num_key_value_heads": 2}, "num_key_value_heads=2 is not supported, only 4"),
        ({"moe_layer_freq": 2}, "moe_layer_freq=2 is not supported"),
        ({"scoring_func": "softmax"}, "scoring_func='softmax' is not supported, only 'sigmoid'"),
        ({"topk_method": "greedy"}, "topk_method='greedy' is not supported, only 'noaux_tc'"),
        ({"num_experts_per_tok": 17}, r"top_k=17: must be in 1..num_experts \(16\)"),
        ({"n_group": 3}, "n_group=3 does not divide num_experts=16"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}, "type 'llama3' is not supported"),
        ({"quantization_config": {"quant_method": "awq"}}, "quant_method='awq' is not supported, only 'fp8'"),
        (
            {"quantization_config": {"quant_method": "fp8", "weight_block_size": [64, 64]}},
            r"weight_block_size=\[64, 64\] is not supported",
        ),
        ({"dtype": "float64"}, "dtype='float64' is not supported"),
        ({"num_hidden_layers": 0}, "config.json: num_hidden_layers=0: must be at least 1"),
        ({"max_position_embeddings": 0}, "config.json: max_position_embeddings=0: must be at least 1"),
        ({"num_nextn_predict_layers": -1}, "config.json: num_nextn_predict_layers=-1: must be at least 0"),
        ({"qk_rope_head_dim": 7}, "config.json: qk_rope_head_dim=7: must be even"),
        ({"routed_scaling_factor": float("nan")}, "routed_scaling_factor=nan: must be a finite number"),
        (
            {"rope_parameters": {**tiny.YARN, "original_max_position_embeddings": 0}},
            "config.json: rope_parameters: .*original_max_position_embeddings=0.0: must be at least 1",
        ),
        ({"eos_token_id": ["a"]}, r"config.json: eos_token_id=\['a'\]: must be token ids"),
        ({"rope_parameters": {**tiny.YARN, "factor": "4"}}, "rope_parameters: factor='4' has the wrong type"),
        ({"rope_parameters": {**tiny.YARN, "rope_theta": "1e4"}}, "rope_parameters: rope_theta='1e4' has the wrong"),
        ({"rope_parameters": {**tiny.YARN, "mscale": "1"}}, "rope_parameters: mscale='1' has the wrong type"),
        ({"rope_parameters": {**tiny.YARN, "beta_fast": 0}}, "config.json: rope_parameters: .*beta_fast=0.0.*above 0"),
        ({"rope_parameters": {**tiny.YARN, "rope_theta": 1}}, "config.json: rope_parameters: .*theta=1.0.*above 1"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_config_errors_name_file_field_and_value(directory, fields, message):
    edit_config(directory, **fields)
    with pytest.raises(ValueError, match=message) as error:
        load(directory)
    assert "config.json" in str(error.value)


def test_config_that_is_no_json(directory):
    (directory / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json: not valid JSON"):
        load(directory)
    (directory / "config.json").unlink()
    with pytest.raises(ValueError, match="no such file"):
        load(directory)


def test_both_rope_spellings_mean_the_same(directory):
    new = read_model_config(EngineConfig(str(directory)))
    rope = json.loads((directory / "config.json").read_text())["rope_parameters"]
    theta, kind = rope.pop("rope_theta"), rope.pop("rope_type")
    edit_config(directory, rope_parameters="remove", rope_theta=theta, rope_scaling={"type": kind, **rope})
    assert read_model_config(EngineConfig(str(directory))) == new
    assert new.rope.kind == "yarn" and new.rope.factor == 4.0


def test_rope_scaling_null_is_plain(directory):
    edit_config(directory, rope_parameters="remove", rope_theta=5e5, rope_scaling=None)
    rope = read_model_config(EngineConfig(str(directory))).rope
    assert (rope.kind, rope.theta) == ("default", 5e5)


@pytest.mark.parametrize("kind", ["v2", "v3"])
def test_absent_fields_of_the_gate_are_what_transformers_says(tmp_path, kind):
    import transformers

    names = ("n_group", "topk_group", "routed_scaling_factor", "norm_topk_prob", "first_k_dense_replace", "topk_method")
    hf = {"v2": transformers.DeepseekV2Config, "v3": transformers.DeepseekV3Config}[kind]()
    fields = {**tiny.V2, **tiny.V3, "q_lora_rank": 24, "model_type": f"deepseek_{kind}", "num_experts_per_tok": 2}
    (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in fields.items() if k not in names}))
    config = read_model_config(EngineConfig(str(tmp_path)))
    moe = config.moe
    assert moe is not None and config.first_k_dense_replace == hf.first_k_dense_replace
    assert moe.routed_scaling_factor == hf.routed_scaling_factor
    if kind == "v3":
        assert (moe.n_group, moe.topk_group) == (hf.n_group, hf.topk_group) == (8, 4)
        assert moe.norm_topk_prob == hf.norm_topk_prob


def test_eos_ids_come_from_both_files(directory):
    edit_config(directory, eos_token_id=1)
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 5]}))
    assert read_model_config(EngineConfig(str(directory))).eos_token_ids == (1, 5)


@pytest.mark.parametrize(
    "stored, requested, want",
    [
        ("bfloat16", "auto", torch.bfloat16),
        ("float32", "auto", torch.float32),
        ("float16", "auto", torch.float32),
        ("bfloat16", "float32", torch.float32),
        ("float32", "bfloat16", torch.bfloat16),
    ],
)
def test_dtype(directory, stored, requested, want):
    edit_config(directory, dtype="remove", torch_dtype=stored)
    config = read_model_config(EngineConfig(str(directory), dtype=requested))
    assert config.moe is not None and config.dtype == config.moe.dtype == want


def test_float16_checkpoint_computes_in_float32(tmp_path):
    hf_model = tiny.make_variant("v3", dtype=torch.float16)
    tiny.save(hf_model, tmp_path)
    runner = PagedRunner(load(tmp_path))
    (prompt,) = tiny.prompts(lengths=(20,))
    want = tiny.golden_logits(hf_model.float(), prompt)
    assert (runner.prefill(runner.request(prompt)) - want).abs().max() < 1e-4


def test_cuda_is_refused(directory):
    with pytest.raises(ValueError, match="--device cuda"):
        load(directory, device="cuda")


# -- tensors --


def test_every_wrong_tensor_is_listed(directory):
    def change(tensors):
        del tensors["model.layers.1.mlp.experts.7.up_proj.weight"]
        del tensors["model.layers.2.mlp.gate.e_score_correction_bias"]
        tensors["model.layers.0.self_attn.o_proj.weight"] = torch.zeros(64, 63)
        tensors["model.norm.weight"] = torch.zeros(64, dtype=torch.int32)
        tensors["model.layers.1.mlp.experts.16.up_proj.weight"] = torch.zeros(48, 64)
        tensors["model.surprise"] = torch.zeros(2)

    edit_tensors(directory, change)
    with pytest.raises(CheckpointError) as error:
        load(directory)
    lines = str(error.value).splitlines()
    assert "6 tensors are wrong" in lines[0] and str(directory) in lines[0]
    for want in (
        "missing: model.layers.1.mlp.experts.7.up_proj.weight [48, 64]",
        "missing: model.layers.2.mlp.gate.e_score_correction_bias [16]",
        "wrong shape: model.layers.0.self_attn.o_proj.weight is [64, 63], expected [64, 64] (model.safetensors)",
        "wrong dtype: model.norm.weight is I32, expected one of F32, BF16, F16 (model.safetensors)",
        "extra: model.layers.1.mlp.experts.16.up_proj.weight [48, 64] (model.safetensors)",
        "extra: model.surprise [2] (model.safetensors)",
    ):
        assert f"  {want}" in lines


def test_a_checkpoint_of_another_model_is_not_listed_in_full(directory):
    edit_tensors(directory, lambda tensors: tensors.update({f"other.{i}": torch.zeros(1) for i in range(100)}))
    with pytest.raises(CheckpointError) as error:
        load(directory)
    lines = str(error.value).splitlines()
    assert "100 tensors are wrong" in lines[0] and len(lines) == 42 and lines[-1] == "  ... and 60 more"


def test_fp8_without_scales_and_scales_without_fp8(directory):
    tiny.quantize_checkpoint(directory)

    def change(tensors):
        del tensors["model.layers.0.mlp.up_proj.weight_scale_inv"]
        tensors["model.layers.0.mlp.down_proj.weight"] = torch.zeros(64, 96)
        tensors["model.layers.0.self_attn.o_proj.weight_scale_inv"] = torch.zeros(2, 1)
        tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].to(torch.float8_e4m3fn)

    edit_tensors(directory, change)
    with pytest.raises(CheckpointError) as error:
        load(directory)
    for want in (
        "missing: model.layers.0.mlp.up_proj.weight_scale_inv [1, 1], the scales of an fp8 matrix",
        "extra: model.layers.0.mlp.down_proj.weight_scale_inv [1, 1]",
        "wrong shape: model.layers.0.self_attn.o_proj.weight_scale_inv is [2, 1], expected [1, 1]",
        "wrong dtype: model.embed_tokens.weight is F8_E4M3",
    ):
        assert want in str(error.value)


def test_scales_that_are_powers_of_two_in_one_byte(directory):
    """ue8m0 (float8_e8m0fnu) is read; the same bytes as plain integers are refused, and so is what holds no scale."""
    tiny.quantize_checkpoint(directory)
    (prompt,) = tiny.prompts(lengths=(9,))

    def rewrite(change):
        def all_scales(tensors):
            names = [name for name in tensors if name.endswith("_scale_inv")]
            tensors.update({name: change(tensors[name]) for name in names})

        edit_tensors(directory, all_scales)

    def logits():
        runner = PagedRunner(load(directory))
        return runner.prefill(runner.request(prompt))

    rewrite(lambda scale: scale.log2().ceil().exp2())
    want = logits()
    rewrite(lambda scale: scale.to(torch.float8_e8m0fnu))
    assert torch.equal(logits(), want)
    for dtype, name in ((torch.uint8, "U8"), (torch.int32, "I32"), (torch.float8_e4m3fn, "F8_E4M3")):
        rewrite(lambda scale, dtype=dtype: torch.ones(scale.shape).to(dtype))
        with pytest.raises(CheckpointError, match=f"wrong dtype: .*_scale_inv is {name}, expected one of F32, BF16"):
            load(directory)


def test_mtp_layer_is_skipped_where_it_is_declared_or_can_be_told(directory):
    def add_mtp(tensors):
        tensors["model.layers.3.eh_proj.weight"] = torch.zeros(64, 128)
        tensors["model.layers.3.mlp.experts.0.up_proj.weight"] = torch.zeros(48, 64)
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(4)

    edit_tensors(directory, add_mtp)
    edit_config(directory, num_nextn_predict_layers=1)
    load(directory)
    edit_config(directory, num_nextn_predict_layers=0)
    load(directory)  # only MTP layers have an eh_proj
    edit_tensors(directory, lambda tensors: tensors.pop("model.layers.3.eh_proj.weight"))
    with pytest.raises(CheckpointError, match=r"1 tensors(.|\n)*extra: model\.layers\.3\.mlp\.experts\.0\.up_proj"):
        load(directory)


def test_no_shared_experts(directory):
    """As DeepSeek's configs say it, null with no tensors, and as transformers saves it, 0 with tensors of no rows."""
    edit_tensors(directory, lambda t: t.update({k: 0 * v for k, v in t.items() if "shared_experts" in k}))
    (prompt,) = tiny.prompts(lengths=(9,))

    def logits():
        runner = PagedRunner(load(directory))
        return runner.prefill(runner.request(prompt))

    def cut(tensors):
        shared = {name: tensor for name, tensor in tensors.items() if "shared_experts" in name}
        tensors.update({k: (v[:, :0] if "down" in k else v[:0]).contiguous() for k, v in shared.items()})

    def remove(tensors):
        for name in [name for name in tensors if "shared_experts" in name]:
            del tensors[name]

    want = logits()
    for number, change in ((0, cut), (None, remove)):
        edit_config(directory, n_shared_experts=number)
        edit_tensors(directory, change)
        assert torch.equal(logits(), want)


def test_tied_head_may_be_in_the_files_or_not(tmp_path):
    hf_model = tiny.make_variant("v3_plain")
    tiny.save(hf_model, tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    (prompt,) = tiny.prompts(lengths=(9,))
    want = tiny.golden_logits(hf_model, prompt)
    for _ in range(2):
        runner = PagedRunner(load(tmp_path))
        assert (runner.prefill(runner.request(prompt)) - want).abs().max() < 1e-4
        edit_tensors(tmp_path, lambda tensors: tensors.update({"lm_head.weight": torch.zeros(128, 64)}))


def test_no_directory_and_no_safetensors(tmp_path):
    with pytest.raises(ValueError, match="no such"):
        load(tmp_path / "nowhere")
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"no \*\.safetensors files \(it has pytorch_model\.bin\)"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize("keep", [0, 5, 300, -1000])
def test_truncated_file_is_named(directory, keep):
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"model\.safetensors: not a complete safetensors file.*cut off"):
        load(directory)


def test_corrupt_header_is_named(directory):
    path = directory / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[20:40] = b"\xff" * 20
    path.write_bytes(bytes(data))
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        load(directory)


# -- shards --


@pytest.fixture
def sharded(tmp_path):
    directory = tiny.save(tiny.make_variant("v3"), tmp_path, max_shard_size="300KB")
    assert len(list(directory.glob("*.safetensors"))) > 3
    return directory


def test_sharded_checkpoint(sharded, source):
    (prompt,) = tiny.prompts(lengths=(9,))
    runners = [PagedRunner(load(d)) for d in (sharded, source)]
    logits = [runner.prefill(runner.request(prompt)) for runner in runners]
    assert torch.equal(*logits)


def test_missing_shards_are_all_named(sharded):
    gone = sorted(sharded.glob("*.safetensors"))[1:3]
    for path in gone:
        path.unlink()
    with pytest.raises(CheckpointError, match=f"{gone[0].name}, {gone[1].name}"):
        load(sharded)


def test_index_that_promises_too_much(sharded):
    path = sharded / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["model.ghost"] = next(iter(index["weight_map"].values()))
    path.write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"promises tensors that the files lack: model\.ghost"):
        load(sharded)
    path.write_text("[]")
    with pytest.raises(CheckpointError, match="not a safetensors index"):
        load(sharded)
    for wrong in (None, ["model.norm.weight"], {"model.norm.weight": 3}):
        path.write_text(json.dumps({"weight_map": wrong}))
        with pytest.raises(CheckpointError, match=r"index\.json: its weight_map must give"):
            load(sharded)


def test_the_same_tensor_twice(directory):
    save_file({"model.norm.weight": torch.ones(64)}, directory / "more.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight is in both"):
        load(directory)


# -- progress --


def test_progress_counts_up_to_all_bytes(directory):
    seen = []
    load(directory, progress=lambda done, total: seen.append((done, total)))
    size = sum(t.numel() * t.element_size() for t in load_file(directory / "model.safetensors").values())
    assert {total for _, total in seen} == {size} and seen[-1][0] == size
    assert all(a[0] < b[0] for a, b in pairwise(seen))
