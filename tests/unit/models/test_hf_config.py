"""From config.json to ModelConfig: published shapes, and fields that do not fit each other."""

import json

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
