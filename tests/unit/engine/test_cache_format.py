"""CacheFormat: what a token takes in a layer, by the option and the model."""

import json

import pytest
import torch

from eprt import EngineConfig
from eprt.engine.cache_format import CacheFormat
from eprt.models.hf_config import read_model_config
from tests import hub_layouts


@pytest.mark.parametrize(("name", "num_bytes", "gib"), [("auto", 1408, 83.875), ("fp8", 788, 46.94)])
def test_a_million_tokens_of_v32(name, num_bytes, gib, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(hub_layouts.V32))
    config = read_model_config(EngineConfig(str(tmp_path)))
    entry = CacheFormat.from_name(name, config, torch.bfloat16)
    assert entry.token_bytes == num_bytes and entry.index is not None
    assert config.num_hidden_layers * entry.token_bytes * 2**20 / 2**30 == pytest.approx(gib, abs=0.005)


def test_models_without_an_indexer_keep_latents_alone(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(hub_layouts.V3))
    entry = CacheFormat.from_name("auto", read_model_config(EngineConfig(str(tmp_path))), torch.bfloat16)
    assert entry.index is None and entry.token_bytes == 1152
