"""Which models are served, and what is said of the others before anything else is read."""

import json

import pytest

from eprt.models import loader
from eprt.models.config_file import ConfigFile
from eprt.models.model_types import SERVED, take_model_type


def config(folder, **fields) -> ConfigFile:
    (folder / "config.json").write_text(json.dumps(fields))
    return ConfigFile(folder / "config.json")


@pytest.mark.parametrize("name", SERVED)
def test_what_is_served_has_a_loader(name, tmp_path):
    assert take_model_type(config(tmp_path, model_type=name)) == name
    assert set(loader._LOADERS) == set(SERVED)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": "llama"}, "model_type='llama' is not supported; supported: deepseek_v2, deepseek_v3"),
        ({"model_type": "deepseek_v41"}, "V4.1's Engram is not implemented; DeepSeek-V4 is served"),
        ({}, "field 'model_type' is missing"),
    ],
)
def test_others_are_refused_by_name(fields, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        take_model_type(config(tmp_path, **fields))
