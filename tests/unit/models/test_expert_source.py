"""Experts read once more, after the checkpoint's files were closed, are those of the start."""

import pytest
import torch

from eprt import EPGroup
from eprt.config import EngineConfig
from eprt.models.checkpoint import CheckpointError
from eprt.models.loader import load_model
from eprt.models.model import ExpertPlace
from tests import tiny


@pytest.mark.parametrize("options", [{}, {"quantization": "int8"}, {"load_format": "dummy"}])
def test_an_expert_in_another_buffer_is_the_same(tmp_path, options):
    tiny.save(tiny.make_model("v3"), tmp_path)
    model = load_model(EngineConfig(str(tmp_path), **options), EPGroup.single())
    layers = model.moe_layers()
    places = [ExpertPlace(row, expert, layers[row].pool.take_buffer()) for row, expert in ((0, 3), (1, 15))]
    model.load_experts(places)
    for row, expert, buffer in places:
        for part in layers[row].pool.parts:
            assert torch.equal(part[buffer], part[layers[row].weight_buffers()[expert]])
    model.close()


def test_a_checkpoint_that_is_gone_is_an_error(tmp_path):
    tiny.save(tiny.make_model("v3"), tmp_path)
    model = load_model(EngineConfig(str(tmp_path)), EPGroup.single())
    for file in tmp_path.glob("*.safetensors"):
        file.unlink()
    with pytest.raises((OSError, CheckpointError), match="safetensors"):
        model.load_experts([ExpertPlace(0, 3, model.moe_layers()[0].pool.take_buffer())])
    model.close()
