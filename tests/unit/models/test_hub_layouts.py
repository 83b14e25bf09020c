"""The releases of DeepSeek on the hub, as synthetic copies: each loads and generates, or is refused by name."""

import json
import math

import pytest

from eprt import EngineConfig, EPGroup
from eprt.config import IndexerConfig
from eprt.engine.llm import LLM
from eprt.engine.sampling_params import SamplingParams
from eprt.engine.tokenizer import Tokenizer
from eprt.layers.rope import softmax_scale
from eprt.models.checkpoint import Checkpoint, CheckpointError
from eprt.models.convert import convert
from eprt.models.deepseek_tensors import check_tensors, expected_tensors, is_skipped
from eprt.models.hf_config import read_model_config
from eprt.models.loader import load_model
from eprt.serve.openai.chat import ChatTemplate
from eprt.serve.openai.protocol import Message
from tests import hub_layouts
from tests.hub_layouts import ASSISTANT, BOS, RELEASES, USER

NUM_LAYERS = 5  # three dense ones in V3
GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
releases = pytest.mark.parametrize("name", RELEASES)


def generate(folder, prompt: str | list[int], **options) -> list[int]:
    with LLM(folder, EPGroup.single(), max_model_len=128, kv_cache_gb=0.02, **options) as llm:
        (output,) = llm.generate([prompt], GREEDY)
    return output.outputs[0].token_ids


@releases
def test_the_release_loads_and_answers_a_chat(name, tmp_path):
    release = RELEASES[name]
    folder = hub_layouts.make_release(name, tmp_path / name, NUM_LAYERS)
    tokenizer = Tokenizer(folder)
    template = ChatTemplate.from_checkpoint(folder, tokenizer)
    assert (template is None) == (not release.template_in)
    question = "What is 12 + 34?"
    if template is None:
        ids = tokenizer.encode(question)
    else:
        prompt = template.render([Message("user", question)])
        assert prompt == f"{BOS}{USER}{question}{ASSISTANT}"
        ids = tokenizer.encode(prompt, add_special_tokens=False)
    assert ids[0] == 0 and ids.count(0) == 1, "one BOS"
    answer = generate(folder, ids)
    assert len(answer) == 6
    if release.mtp and release.config["num_nextn_predict_layers"]:
        assert generate(folder, ids, num_speculative_tokens=1) == answer, "drafts change no token"


@releases
def test_names_and_shapes_of_the_full_release(name, tmp_path):
    """Against a list of their own in hub_layouts: nothing is missing, and what is left over is known."""
    release = RELEASES[name]
    (tmp_path / "config.json").write_text(json.dumps(release.config))
    config = read_model_config(EngineConfig(str(tmp_path)))
    have = dict(hub_layouts.tensor_shapes(release.config, release.mtp))
    for mtp in {False, release.mtp}:
        expected = expected_tensors(config, mtp)
        assert {tensor: have.get(tensor) for tensor in expected} == {t: shape for t, (shape, _) in expected.items()}
        assert all(is_skipped(config, tensor, have, mtp) for tensor in have.keys() - expected.keys())


@pytest.mark.parametrize(
    ("name", "scale", "gate"),
    [
        ("V2-Lite", 192**-0.5 * (0.0707 * math.log(40) + 1) ** 2, ("softmax", 1, 1, False, 1.0)),
        ("V2", 192**-0.5 * (0.0707 * math.log(40) + 1) ** 2, ("softmax", 8, 3, False, 16.0)),
        ("V2-Lite-resaved", 192**-0.5 * (0.0707 * math.log(40) + 1) ** 2, ("softmax", 1, 1, False, 1.0)),
        ("V3", 192**-0.5 * (0.1 * math.log(40) + 1) ** 2, ("sigmoid", 8, 4, True, 2.5)),
        ("V3.1", 192**-0.5 * (0.1 * math.log(40) + 1) ** 2, ("sigmoid", 8, 4, True, 2.5)),
        ("V3.2", 192**-0.5 * (0.1 * math.log(40) + 1) ** 2, ("sigmoid", 8, 4, True, 2.5)),
        ("V3.2-resaved", 192**-0.5 * (0.1 * math.log(40) + 1) ** 2, ("sigmoid", 8, 4, True, 2.5)),
    ],
)
def test_what_the_full_config_means(name, scale, gate, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(RELEASES[name].config))
    config = read_model_config(EngineConfig(str(tmp_path)))
    assert softmax_scale(config.rope, config.qk_head_dim) == pytest.approx(scale, rel=1e-8)
    moe = config.moe
    assert moe is not None
    have = (moe.scoring, moe.n_group, moe.topk_group, moe.norm_topk_prob, moe.routed_scaling_factor)
    assert have == gate
    assert (config.rope.factor, config.rope.original_max_position_embeddings) == (40, 4096)
    assert config.quant_method == ("fp8" if RELEASES[name].fp8 else None)
    assert config.indexer == (IndexerConfig(64, 128, 2048) if "V3.2" in name else None)
    assert config.first_k_dense_replace == (3 if config.model_type != "deepseek_v2" else 1)


@pytest.mark.parametrize("name", ["V3", "V3.2"])
def test_a_converted_release_generates_the_same(name, tmp_path):
    source = hub_layouts.make_release(name, tmp_path / name, NUM_LAYERS)
    convert(source, tmp_path / "converted", 4)
    prompt = "The capital of France"
    want = generate(source, prompt, num_speculative_tokens=1)
    assert generate(tmp_path / "converted", prompt, num_speculative_tokens=1) == want


def test_files_beside_those_of_the_index_are_left_alone(tmp_path):
    folder = hub_layouts.make_release("V2-Lite", tmp_path / "V2-Lite", NUM_LAYERS)
    (folder / "consolidated.safetensors").write_bytes(b"not read")
    (folder / "pytorch_model.bin").write_bytes(b"not read")
    load_model(EngineConfig(str(folder)), EPGroup.single())


# -- what is refused --


def spoiled(tmp_path, **fields):
    folder = tmp_path / "spoiled"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**hub_layouts.V3, **fields}))
    return EngineConfig(str(folder))


@pytest.mark.parametrize(
    "quantisation",
    [
        {"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm", "zero_point": True},
        {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True},
        {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {}},
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
        {"quant_method": "modelopt", "quant_algo": "NVFP4"},
    ],
    ids=lambda q: q["quant_method"],
)
def test_other_quantisations_are_refused_by_name(quantisation, tmp_path):
    engine = spoiled(tmp_path, quantization_config=quantisation)
    with pytest.raises(
        ValueError, match=rf"quant_method='{quantisation['quant_method']}' is not.* use the fp8 or bf16"
    ):
        load_model(engine, EPGroup.single())


def test_nvidias_quantisation_is_refused_where_config_json_does_not_say_it(tmp_path):
    engine = spoiled(tmp_path, quantization_config=None)
    folder = tmp_path / "spoiled"
    fields = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4", "group_size": 16}}
    (folder / "hf_quant_config.json").write_text(json.dumps(fields))
    with pytest.raises(ValueError, match=r"hf_quant_config\.json: quant_algo='NVFP4' is not supported; use the fp8"):
        load_model(engine, EPGroup.single())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": "deepseek_v41", "hc_mult": 4}, "deepseek_v41' is not supported; .*DeepSeek-V4 is served"),
        ({"model_type": "qwen2"}, "qwen2' is not supported; supported: deepseek_v2, deepseek_v3, d"),  # R1-Distill
    ],
)
def test_other_models_are_refused_by_name(fields, message, tmp_path):
    engine = spoiled(tmp_path, **fields)
    for read in (read_model_config, lambda engine: load_model(engine, EPGroup.single())):
        with pytest.raises(ValueError, match=message):
            read(engine)


def test_drafts_without_the_mtp_layer_in_the_files(tmp_path):
    folder = hub_layouts.make_release("V3-bf16-no-mtp", tmp_path / "V3", NUM_LAYERS)
    config = read_model_config(EngineConfig(str(folder)))
    checkpoint = Checkpoint(folder)
    check_tensors(config, checkpoint)
    with pytest.raises(CheckpointError, match=r"no MTP layer.*files hold no model\.layers\.5\.\*.*leave --num-spec"):
        check_tensors(config, checkpoint, mtp=True)
