"""Which blocks are known, and what DeepSeek's remote code does otherwise."""

from types import SimpleNamespace

import pytest
from torch import nn

from eprt.compat.hf.kinds import KINDS, is_moe_block, kind_of
from tests import tiny, tiny_v4


def test_every_family_has_its_kind():
    seen = {type(tiny.make_moe_block(family)).__name__.lower() for family in tiny.FAMILIES}
    v4 = tiny_v4.make_model(num_hidden_layers=1, compress_ratios=[0]).model.layers[0].mlp
    assert {*seen, type(v4).__name__.lower()} == set(KINDS)
    assert not is_moe_block(nn.Linear(2, 2))
    with pytest.raises(
        TypeError, match="ReLU is not a block of the kinds deepseekv2moe, deepseekv3moe, deepseekv32moe, "
    ):
        kind_of(nn.ReLU())


@pytest.mark.parametrize("normalise", [False, True])
def test_v2_of_the_remote_code_normalises_or_scales(normalise):
    class MoEGate: ...

    fields = {"topk_method": "greedy", "num_experts_per_tok": 2, "norm_topk_prob": normalise, "n_group": 4}
    config = SimpleNamespace(**fields, topk_group=2, routed_scaling_factor=16.0)
    routing = KINDS["deepseekv2moe"].routing(SimpleNamespace(config=config, gate=MoEGate()))
    assert routing["norm_topk_prob"] == normalise and routing["n_group"] == 1
    assert routing["routed_scaling_factor"] == (1.0 if normalise else 16.0)
