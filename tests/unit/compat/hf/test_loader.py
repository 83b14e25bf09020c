"""Tensors by name: what loaders may be, and the names of a kind's checkpoints."""

import pytest
import torch

from eprt.compat.hf.kinds import KINDS
from eprt.compat.hf.loader import NamedWeights, open_loader
from eprt.models.checkpoint import Checkpoint, CheckpointError
from eprt.ops.weight import Weight, quantize_fp8
from tests import tiny


def test_a_directory_an_open_checkpoint_or_a_function(tmp_path):
    model = tiny.make_family("v3")
    tiny.save(model, tmp_path)
    name, want = "model.layers.1.mlp.gate.weight", model.model.layers[1].mlp.gate.weight
    for loader in (tmp_path, str(tmp_path), Checkpoint(tmp_path), {name: want}.__getitem__):
        assert torch.equal(open_loader(loader)(name), want)
    with pytest.raises(CheckpointError, match="no such directory"):
        open_loader(tmp_path / "absent")


@pytest.mark.parametrize(
    "kind, prefix, want",
    [
        ("deepseekv3moe", "model.layers.3.mlp.", "model.layers.3.mlp.experts.2.gate_proj.weight"),
        ("mixtralsparsemoeblock", "model.layers.3.mlp.", "model.layers.3.block_sparse_moe.experts.2.w1.weight"),
        ("mixtralsparsemoeblock", "", "experts.2.w1.weight"),
    ],
)
def test_names_are_those_of_published_checkpoints(kind, prefix, want):
    asked = []
    named = NamedWeights(lambda name: asked.append(name) or torch.zeros(64, 48).T, prefix, KINDS[kind])
    with pytest.raises(ValueError, match=r"expected \(64, 48\)"):
        named.expert(2, 48, 64)
    assert asked[0] == want and len(asked) == 3


def test_fp8_comes_with_its_scales():
    weight = quantize_fp8(torch.randn(200, 130))
    tensors = {"m.weight": weight.data, "m.weight_scale_inv": weight.scale}
    named = NamedWeights(tensors.__getitem__, "", KINDS["deepseekv3moe"])
    got = named._matrix("m.weight", (200, 130))
    assert isinstance(got, Weight) and torch.equal(got.dequantize(), weight.dequantize())
    del tensors["m.weight_scale_inv"]
    with pytest.raises(ValueError, match=r"tensor m\.weight_scale_inv is not there"):
        named._matrix("m.weight", (200, 130))
