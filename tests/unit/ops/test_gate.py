"""The gate kernel against its oracle, against transformers' own routers, and against its promises."""

import itertools
from typing import Any

import pytest
import torch

from eprt import ops
from eprt.config import MoEConfig
from eprt.layers.gate import Gate
from eprt.ops.gate import GateRule
from tests import reference_ops as reference
from tests import tiny


def by_expert(weights_TK, expert_idx_TK):
    """The same choice in ascending order of experts: transformers promises no order."""
    order = expert_idx_TK.argsort(-1)
    return weights_TK.gather(1, order), expert_idx_TK.gather(1, order)


CASES = [
    (scoring, experts, top_k, groups, kept, norm)
    for scoring, (experts, top_k, groups, kept), norm in itertools.product(
        ("sigmoid", "softmax", "softmax_topk"),
        ((16, 4, 4, 2), (16, 4, 1, 1), (256, 8, 8, 4), (160, 6, 8, 3), (7, 7, 1, 1), (6, 1, 6, 2), (13, 3, 1, 1)),
        (True, False),
    )
]


@pytest.mark.parametrize("scoring, experts, top_k, groups, kept, norm", CASES)
def test_kernel_equals_oracle(scoring, experts, top_k, groups, kept, norm):
    torch.manual_seed(experts)
    logits = torch.randn(70, experts) * 2
    bias = torch.randn(experts) * 0.2 if scoring == "sigmoid" else None
    args = (logits, bias, GateRule(scoring, top_k, groups, kept, norm, 2.5))
    weights, idx = ops.gate_topk(*args)
    want_weights, want_idx = reference.gate_topk(*args)
    assert torch.equal(idx, want_idx)
    torch.testing.assert_close(weights, want_weights, rtol=2e-6, atol=0)


def test_slots_are_those_of_the_chosen_experts():
    """Padding goes to none."""
    torch.manual_seed(0)
    logits, bias, rule = torch.randn(5, 12), torch.randn(12), GateRule("sigmoid", 4, 4, 2, True, 2.5)
    token, slot = torch.tensor([7, -1, 0, 3, -1]), torch.cat((torch.randperm(16)[:12], torch.tensor([-1])))
    weights, idx, slots = ops.gate_slots(logits, bias, rule, token, slot)
    want_weights, want_idx = ops.gate_topk(logits, bias, rule, token)
    assert torch.equal(weights, want_weights) and torch.equal(idx, want_idx)
    assert torch.equal(slots, slot[want_idx]) and slots[1].tolist() == [-1] * 4 and slots[0].min() >= 0


@pytest.mark.parametrize("scoring", ["sigmoid", "softmax"])
def test_ties_go_to_the_lowest_index(scoring):
    logits = torch.zeros(3, 12)
    logits[1, [3, 8]] = 1.0
    for gate_topk in (ops.gate_topk, reference.gate_topk):
        _, idx = gate_topk(logits, None, GateRule(scoring, 4, 4, 2, True, 1.0))
        assert idx.tolist() == [[0, 1, 2, 3], [3, 8, 4, 5], [0, 1, 2, 3]]


def test_bias_moves_the_choice_but_not_the_weights():
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    weights, idx = ops.gate_topk(logits, torch.tensor([0.0, 0.0, 0.0, 9.0]), GateRule("sigmoid", 2, 1, 1, False, 1.0))
    assert idx.tolist() == [[3, 0]]
    torch.testing.assert_close(weights, logits.sigmoid()[:, [3, 0]])


@pytest.mark.parametrize("experts", [5, 16, 31, 256])
def test_a_row_does_not_depend_on_its_batch(experts):
    logits = torch.randn(129, experts)
    bias = torch.randn(experts) * 0.1
    weights, idx = ops.gate_topk(logits, bias, GateRule("sigmoid", 3, 1, 1, True, 2.5))
    for row in (0, 64, 128):
        alone_weights, alone_idx = ops.gate_topk(logits[row : row + 1], bias, GateRule("sigmoid", 3, 1, 1, True, 2.5))
        assert torch.equal(alone_weights[0], weights[row]) and torch.equal(alone_idx[0], idx[row])


def test_nan_still_chooses_different_experts():
    logits = torch.randn(4, 16)
    logits[1] = float("nan")
    logits[2, 5] = float("nan")
    _, idx = ops.gate_topk(logits, None, GateRule("sigmoid", 4, 4, 2, True, 1.0))
    for row in idx.tolist():
        assert len(set(row)) == 4 and all(0 <= e < 16 for e in row)


def test_no_tokens():
    weights, idx = ops.gate_topk(torch.empty(0, 16), None, GateRule("softmax", 4, 1, 1, True, 1.0))
    assert weights.shape == idx.shape == (0, 4)


def test_bad_arguments_name_the_value():
    logits = torch.zeros(1, 16)
    with pytest.raises(ValueError, match="5 of 16 experts from 1 of 4 groups"):
        ops.gate_topk(logits, None, GateRule("sigmoid", 5, 4, 1, True, 1.0))
    with pytest.raises(ValueError, match="float64"):
        ops.gate_topk(logits.double(), None, GateRule("sigmoid", 2, 1, 1, True, 1.0))
    with pytest.raises(ValueError, match=r"\(15,\)"):
        ops.gate_topk(logits, torch.zeros(15), GateRule("sigmoid", 2, 1, 1, True, 1.0))


def routers():
    """(id, transformers router, our config) of every family."""
    from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Config, DeepseekV2TopkRouter
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Config, DeepseekV3TopkRouter
    from transformers.models.mixtral.modeling_mixtral import MixtralConfig, MixtralTopKRouter
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeConfig, Qwen3MoeTopKRouter

    size = {"hidden_size": 64, "intermediate_size": 32, "num_experts": 16, "top_k": 4, "dtype": torch.float32}
    v2 = DeepseekV2Config(**{**tiny.V2, "routed_scaling_factor": 16.0})
    v2_groups = DeepseekV2Config(**{**tiny.V2, "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2})
    v3 = DeepseekV3Config(**tiny.V3)
    mixtral = MixtralConfig(hidden_size=64, num_local_experts=16, num_experts_per_tok=4)
    qwen: dict[str, Any] = {"hidden_size": 64, "num_experts": 16, "num_experts_per_tok": 4}
    greedy = MoEConfig(**size, scoring="softmax", norm_topk_prob=False, routed_scaling_factor=16.0)
    grouped = MoEConfig(**size, scoring="softmax", norm_topk_prob=False, n_group=4, topk_group=2)
    sigmoid = MoEConfig(**size, scoring="sigmoid", n_group=4, topk_group=2, routed_scaling_factor=2.5)
    return {
        "v2": (DeepseekV2TopkRouter(v2), greedy),
        "v2_groups": (DeepseekV2TopkRouter(v2_groups), grouped),
        "v3": (DeepseekV3TopkRouter(v3), sigmoid),
        "mixtral": (MixtralTopKRouter(mixtral), MoEConfig(**size, scoring="softmax_topk")),
        "qwen3": (
            Qwen3MoeTopKRouter(Qwen3MoeConfig(**qwen, norm_topk_prob=False)),
            MoEConfig(**size, scoring="softmax_topk", norm_topk_prob=False),
        ),
        "qwen3_norm": (
            Qwen3MoeTopKRouter(Qwen3MoeConfig(**qwen, norm_topk_prob=True)),
            MoEConfig(**size, scoring="softmax_topk"),
        ),
    }


@pytest.mark.parametrize("family", ["v2", "v2_groups", "v3", "mixtral", "qwen3", "qwen3_norm"])
@torch.no_grad()
def test_gate_chooses_as_transformers_does(family):
    router, config = routers()[family]
    torch.manual_seed(3)
    router.weight.normal_(0, 0.3)
    bias = getattr(router, "e_score_correction_bias", None)
    if bias is not None:
        bias.normal_(0, 0.2)
    x_TH = torch.randn(200, 64)
    gate = Gate(config, router.weight.detach(), bias)
    weights, idx = by_expert(*gate.choose(gate.logits(x_TH)))
    _, hf_weights, hf_idx = router(x_TH)
    want_weights, want_idx = by_expert(hf_weights, hf_idx)
    assert torch.equal(idx, want_idx)
    torch.testing.assert_close(weights, want_weights, rtol=1e-5, atol=1e-7)


def test_roots_of_softplus_and_experts_that_are_given():
    logits = torch.randn(9, 16, generator=torch.Generator().manual_seed(0)) * 8
    bias = torch.randn(16, generator=torch.Generator().manual_seed(1))
    rule = GateRule("sqrtsoftplus", 3, 1, 1, True, 1.5)
    scores = torch.nn.functional.softplus(logits).sqrt()
    weights, idx = ops.gate_topk(logits, bias, rule)
    assert torch.equal(idx, (scores + bias).topk(3).indices)
    chosen = scores.gather(1, idx)
    torch.testing.assert_close(weights, chosen / chosen.sum(1, keepdim=True) * 1.5)
    given = idx.flip(1)
    weights, got = ops.gate_topk(logits, None, rule, torch.tensor([0] * 8 + [-1]), given)
    assert torch.equal(got[:8], given[:8]) and (got[8] == -1).all()
    chosen = scores.gather(1, given)
    torch.testing.assert_close(weights, chosen / chosen.sum(1, keepdim=True) * 1.5)
    with pytest.raises(ValueError, match=r"given experts are from 0 to 16; there are 0..15"):
        ops.gate_topk(logits, None, rule, None, torch.full((9, 3), 16).scatter(1, torch.tensor([[0]]), 0))
