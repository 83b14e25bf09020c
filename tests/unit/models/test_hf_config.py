"""From config.json to ModelConfig: published shapes, and fields that do not fit each other."""

import pytest

from eprt import EngineConfig, EPGroup
from eprt.models.hf_config import read_model_config
from eprt.models.loader import load_model
from tests.paths import DEMO, ROOT


def test_the_shape_of_the_benchmark_is_deepseek_v3():
    shape = ROOT / "benchmarks" / "shapes" / "deepseek_v3"
    config = read_model_config(EngineConfig(str(shape), num_hidden_layers=5, load_format="dummy"))
    assert (config.num_hidden_layers, config.hidden_size, config.kv_dim, config.quant_method) == (5, 7168, 576, "fp8")
    assert config.moe is not None and (config.moe.num_experts, config.moe.top_k) == (256, 8)


def test_more_layers_than_the_model_has_are_refused():
    with pytest.raises(ValueError, match=r"--num-hidden-layers 9: .*config\.json has 4 layers; must be in 1\.\.4"):
        load_model(EngineConfig(DEMO, load_format="dummy", num_hidden_layers=9), EPGroup.single())
