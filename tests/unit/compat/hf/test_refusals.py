"""What would be left out in silence is refused, by the name of its module and with a remedy."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from eprt import EPGroup, EPMoE
from tests import tiny
from tests.unit.compat.hf.cases import fp8_block


class Adapter(nn.Module):
    """As PEFT wraps a linear."""

    def __init__(self, base_layer: nn.Module):
        super().__init__()
        self.base_layer = base_layer


def refuses(block, words: str) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        EPMoE.from_hf(block, EPGroup.single())
    assert str(caught.value).startswith("[rank 0/1] ")


def test_adapters():
    block = tiny.make_moe_block("v3")
    block.shared_experts.up_proj = Adapter(block.shared_experts.up_proj)
    refuses(block, r"DeepseekV3MoE.shared_experts.up_proj has an adapter \(Adapter\); merge it first: model.merge_and")
    block = tiny.make_moe_block("v3")
    block.experts = Adapter(block.experts)
    refuses(block, r"DeepseekV3MoE.experts has an adapter")


def test_parametrizations():
    block = tiny.make_moe_block("v3")
    parametrize.register_parametrization(block.gate, "weight", nn.Identity())
    refuses(block, "gate is parametrized; call .*remove_parametrizations")


@pytest.mark.parametrize("kind", ["forward_hook", "forward_pre_hook", "full_backward_hook"])
def test_hooks(kind):
    block = tiny.make_moe_block("qwen3")
    handle = getattr(block.experts, f"register_{kind}")(lambda *arguments: None)
    refuses(block, r"Qwen3MoeSparseMoeBlock.experts has a hook .*, which would no longer be called; remove it first")
    handle.remove()
    EPMoE.from_hf(block, EPGroup.single())


def test_hooks_of_transformers_itself_do_not_count():
    """They wait on every router, once somebody has asked for its logits."""
    model = tiny.make_family("qwen3")
    model(torch.tensor([[3, 4]]), output_router_logits=True)
    block = model.model.layers[0].mlp
    assert any(module._forward_hooks for module in block.modules())
    EPMoE.from_hf(block, EPGroup.single())


def test_offloaded_blocks():
    block = tiny.make_moe_block("v3")
    block.experts._hf_hook = object()
    refuses(block, "experts is offloaded or moved by accelerate; load the model onto one device")


def test_biases():
    block = tiny.make_moe_block("v3")
    block.shared_experts.down_proj.bias = nn.Parameter(torch.zeros(64))
    refuses(block, "DeepseekV3MoE.shared_experts.down_proj.bias is a bias, which experts and gates here do not have")


def test_other_activations():
    block = tiny.make_moe_block("qwen3")
    block.experts.act_fn = nn.GELU()
    refuses(block, "Qwen3MoeSparseMoeBlock.experts uses GELU; only SiLU")
    block = tiny.make_moe_block("qwen3")
    block.experts.swiglu_limit = 7.0
    refuses(block, "experts has swiglu_limit=7.0; only plain SwiGLU")


def test_formats_that_are_not_read():
    refuses(
        tiny.make_moe_block("v3", dtype=torch.float16), r"is torch\.float16; load the model with dtype=torch.bfloat"
    )
    block, _ = fp8_block("v3")
    block.experts.block_size = (64, 64)
    refuses(block, r"experts has fp8 blocks of \(64, 64\); only 128 x 128")
    block, _ = fp8_block("v3")
    block.experts.activation_scheme = "static"
    refuses(block, "experts has static activation scales")
    block, _ = fp8_block("v3")
    packed = torch.zeros(16, 256, 64, dtype=torch.int8)
    block.experts.down_proj = nn.Parameter(packed, requires_grad=False)
    refuses(block, r"DeepseekV3MoE.experts.down_proj is torch.int8; load the model")
