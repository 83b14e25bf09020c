"""DeepSeek V4's blocks, replaced in transformers' model: gates, tables of experts by token id, and cut activations."""

import pytest
import torch

from eprt import EPGroup
from eprt.compat.hf import replace_moe_blocks
from tests import tiny_v4


@torch.no_grad()
def logits(model, tokens):
    return model(tokens, use_cache=False).logits


def test_a_model_computes_the_same_with_its_blocks_replaced():
    model = tiny_v4.make_model()
    tokens = torch.randint(2, 128, (1, 150), generator=torch.Generator().manual_seed(3))
    want = logits(model, tokens)
    layers = replace_moe_blocks(model, EPGroup.single())
    assert (logits(model, tokens) - want).abs().max() < 1e-4
    state = layers[0].state_dict()
    assert state["gate.tid2eid"].shape == (128, 2) and "gate.e_score_correction_bias" not in state
    assert "gate.e_score_correction_bias" in layers[2].state_dict()


def test_a_layer_with_a_table_needs_token_ids():
    model = tiny_v4.make_model(num_hidden_layers=1, compress_ratios=[0], num_hash_layers=1)
    (layer,) = replace_moe_blocks(model, EPGroup.single())
    with pytest.raises(ValueError, match="pass input_ids"):
        layer(torch.zeros(3, 64))
    padding = torch.tensor([5, -1, 5])
    out = layer(torch.ones(3, 64), padding)
    assert torch.equal(out[0], out[2]) and not torch.equal(out[0], out[1])


def test_tables_that_name_other_experts_are_refused():
    model = tiny_v4.make_model(num_hidden_layers=1, compress_ratios=[0], num_hash_layers=1)
    (layer,) = replace_moe_blocks(model, EPGroup.single())
    weight = torch.zeros(8, 64)
    with pytest.raises(ValueError, match=r"names 0..8; there are 0..7"):
        layer.load_gate(weight, None, torch.tensor([[0, 8]]))
    with pytest.raises(ValueError, match=r"expected integers \[vocabulary, 2\]"):
        layer.load_gate(weight, None, torch.zeros(128, 3, dtype=torch.int64))
