"""From config.json to ModelConfig: published shapes, and fields that do not fit each other."""

import json
from pathlib import Path

import pytest

from eprt import EngineConfig, EPGroup
from eprt.config import IndexerConfig
from eprt.models.hf_config import read_model_config
from eprt.models.loader import load_model
from tests import hub_layouts
from tests.paths import DEMO, ROOT


def test_the_shape_of_the_benchmark_is_deepseek_v3():
    shape = ROOT / "benchmarks" / "shapes" / "deepseek_v3"
    config = read_model_config(EngineConfig(str(shape), num_hidden_layers=5, load_format="dummy"))
    assert (config.num_hidden_layers, config.hidden_size, config.kv_dim, config.quant_method) == (5, 7168, 576, "fp8")
    assert config.moe is not None and (config.moe.num_experts, config.moe.top_k) == (256, 8)


def test_more_layers_than_the_model_has_are_refused():
    with pytest.raises(ValueError, match=r"--num-hidden-layers 9: .*config\.json has 4 layers; must be in 1\.\.4"):
        load_model(EngineConfig(DEMO, load_format="dummy", num_hidden_layers=9), EPGroup.single())


def demo_with(tmp_path, **fields):
    """The demo model's config with these fields, as JSON."""
    given = {**json.loads((Path(DEMO) / "config.json").read_text()), **fields}
    (tmp_path / "config.json").write_text(json.dumps(given))
    return read_model_config(EngineConfig(str(tmp_path)))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_hidden_layers": 1 << 31}, "num_hidden_layers=2147483648: must be at most 10000"),
        ({"n_routed_experts": 10**300}, r"n_routed_experts=10*\.\.\.: must be at most 100000"),
        ({"num_nextn_predict_layers": 1001}, "num_nextn_predict_layers=1001: must be at most 1000"),
        ({"v_head_dim": 1 << 31}, "v_head_dim=2147483648: must be at most 2147483647"),
        ({"vocab_size": -(10**300)}, r"vocab_size=-10*\.\.\.: must be at least 1"),
        ({"rope_theta": 10**400}, r"rope_theta=10*\.\.\.: must be a finite number"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps=nan: must be a finite number"),
        ({"hidden_size": "x" * 100_000}, r"hidden_size='x*\.\.\. has the wrong type \(str\)"),
        ({"hidden_act": "x" * 100_000}, r"hidden_act='x*\.\.\. is not supported"),
        ({"torch_dtype": "x" * 100_000}, r"dtype='x*\.\.\. is not supported"),
        ({"model_type": "x" * 100_000}, r"model_type.*xxx\.\.\."),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_extreme_values_are_refused_in_a_short_line(fields, message, tmp_path):
    with pytest.raises(ValueError, match=message) as caught:
        demo_with(tmp_path, **fields)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 700 and str(tmp_path) in str(caught.value)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, '{"vocab_size": ' + "9" * 5000 + "}"])
def test_json_that_cannot_be_read_is_refused(text, tmp_path):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=r"config.json: not valid JSON"):
        read_model_config(EngineConfig(str(tmp_path)))


# -- V3.2 --


def v32(tmp_path, **fields):
    """The release's config with these fields; None removes one."""
    all_fields = {**hub_layouts.V32, **fields}
    (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in all_fields.items() if v is not None}))
    return read_model_config(EngineConfig(str(tmp_path)))


def test_sizes_of_the_indexer_are_those_of_the_release_where_the_file_has_none(tmp_path):
    none = {"index_topk": None, "index_n_heads": None, "index_head_dim": None}
    assert v32(tmp_path, **none).indexer == v32(tmp_path).indexer == IndexerConfig(64, 128, 2048)


def test_kinds_of_layers_stand_in_for_the_number_of_dense_ones(tmp_path):
    kinds = ["dense"] * 2 + ["sparse"] * 59
    assert v32(tmp_path, first_k_dense_replace=None, mlp_layer_types=kinds).first_k_dense_replace == 2
    assert v32(tmp_path, first_k_dense_replace=None, mlp_layer_types=["dense"] * 61).first_k_dense_replace == 61
    assert v32(tmp_path, first_k_dense_replace=None).first_k_dense_replace == 3
    with pytest.raises(ValueError, match=r"mlp_layer_types=.* is not supported, only 'dense' layers before 'sparse'"):
        v32(tmp_path, first_k_dense_replace=None, mlp_layer_types=["sparse", "dense"])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"layer_types": ["full_attention"]}, r"layer_types=\['full_attention'\] is not supported, only indexed_att"),
        ({"q_lora_rank": None}, "q_lora_rank is null: the indexer's queries come from the query latent"),
        ({"index_topk": 0}, "index_topk=0: must be at least 1"),
        ({"index_n_heads": "64"}, "index_n_heads='64' has the wrong type"),
        ({"index_head_dim": 32}, r"index_head_dim=32: must be at least qk_rope_head_dim \(64\), which it rotates"),
    ],
)
def test_an_indexer_that_cannot_be(fields, message, tmp_path):
    with pytest.raises(ValueError, match=f"{tmp_path}.*{message}"):
        v32(tmp_path, **fields)
