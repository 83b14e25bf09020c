"""MoEConfig, RopeConfig and ModelConfig: what they derive, and values that cannot be."""

import pytest

from eprt.config import ModelConfig, MoEConfig, RopeConfig

MOE = {"hidden_size": 64, "intermediate_size": 32, "num_experts": 16, "top_k": 4}
MODEL = {
    "model_type": "deepseek_v3",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "first_k_dense_replace": 1,
}


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"scoring": "tanh"}, "scoring='tanh': must be softmax, sigmoid, softmax_topk or sqrtsoftplus"),
        ({"top_k": 0}, r"top_k=0: must be in 1\.\.num_experts \(16\)"),
        ({"top_k": 17}, r"top_k=17: must be in 1\.\.num_experts \(16\)"),
        ({"n_group": 3}, "n_group=3 does not divide num_experts=16"),
        ({"n_group": 4, "topk_group": 5}, r"topk_group=5: must be in 1\.\.n_group \(4\)"),
        ({"n_group": 8, "top_k": 3}, "top_k=3: the 1 groups that a token may use hold only 2 experts"),
        ({"payload": "fp4"}, "payload='fp4': must be same or fp8"),
        ({"weight_format": "fp3"}, "weight_format='fp3': must be same, fp8, int8 or fp4"),
        ({"dtype": "torch.float16"}, "dtype=torch.float16: must be float32 or bfloat16"),
        ({"num_max_tokens_per_rank": 0}, "num_max_tokens_per_rank must be at least 1"),
    ],
)
def test_a_moe_layer_that_cannot_be_is_named(changes, message):
    with pytest.raises(ValueError, match=message):
        MoEConfig(**{**MOE, **changes})


def test_groups_that_hold_just_enough_experts_will_do():
    assert MoEConfig(**{**MOE, "n_group": 4, "topk_group": 1}).top_k == 4


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"kind": "linear"}, "rope type 'linear': must be default or yarn"),
        ({"theta": 0.0}, "rope theta=0.0, factor=1.0: must be above 0"),
        ({"kind": "yarn", "theta": 1.0}, "rope theta=1.0: must be above 1 for yarn"),
        (
            {"kind": "yarn", "original_max_position_embeddings": 0},
            "rope original_max_position_embeddings=0: must be at least 1",
        ),
        ({"kind": "yarn", "beta_slow": 0.0}, "rope beta_fast=32.0, beta_slow=0.0: must be above 0"),
    ],
)
def test_a_rotary_embedding_that_cannot_be_is_named(changes, message):
    with pytest.raises(ValueError, match=message):
        RopeConfig(**changes)
    if changes.get("kind") == "yarn":
        RopeConfig(**{**changes, "kind": "default", "theta": 2.0})  # the other fields belong to yarn


def test_a_model_knows_its_derived_sizes_and_which_layers_have_experts():
    config = ModelConfig(**MODEL, moe=MoEConfig(**MOE))
    assert (config.qk_head_dim, config.kv_dim) == (24, 40)
    assert [config.is_moe_layer(layer) for layer in range(3)] == [False, True, True]
    assert not ModelConfig(**MODEL, moe=None).is_moe_layer(2)
    with pytest.raises(ValueError, match="qk_rope_head_dim=7: must be even"):
        ModelConfig(**{**MODEL, "qk_rope_head_dim": 7}, moe=None)
