"""Weights without files."""

import pytest
import torch

from eprt import EngineConfig, EPGroup
from eprt.models import dummy
from eprt.models.deepseek_builder import open_checkpoint
from eprt.models.hf_config import read_model_config
from eprt.models.loader import load_model
from tests import tiny
from tests.paged import PagedRunner


@pytest.mark.parametrize("kind", ["v3", "v32"])
def test_dummy_weights_have_the_shape_and_no_files(kind, tmp_path):
    """Also fp8 ones, from a config.json alone; the same in every process."""
    tiny.save(tiny.make_model(kind, hidden_size=256, moe_intermediate_size=128, intermediate_size=384), tmp_path)
    tiny.quantize_checkpoint(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    logits = []
    for _ in range(2):
        model = load_model(EngineConfig(str(tmp_path), load_format="dummy", num_hidden_layers=2), EPGroup.single())
        assert len(model.layers) == 2 and model.layers[1].mlp.pool.weight_format == "fp8"
        runner = PagedRunner(model)
        logits.append(runner.prefill(runner.request(tiny.prompts()[1])))
        model.close()
    assert torch.equal(*logits) and logits[0].isfinite().all() and 0.01 < logits[0].std() < 100


@pytest.mark.parametrize("ahead_bytes", [1, 1 << 29])
def test_values_do_not_depend_on_what_is_drawn_ahead(ahead_bytes, tmp_path, monkeypatch):
    """Nor on the order of reading, which need not be the announced one."""
    monkeypatch.setattr(dummy, "_AHEAD_BYTES", ahead_bytes)
    tiny.save(tiny.make_model("v3", hidden_size=256, moe_intermediate_size=128), tmp_path)
    tiny.quantize_checkpoint(tmp_path)
    engine = EngineConfig(str(tmp_path), load_format="dummy", num_hidden_layers=2)
    plain, ahead = (open_checkpoint(engine, read_model_config(engine)) for _ in range(2))
    names = list(ahead.tensors)
    ahead.read_ahead(names[::2])
    for name in [*names[1:4], *reversed(names)]:
        assert torch.equal(ahead.read(name).float(), plain.read(name).float()), name
    ahead.close()
