"""Rotary tables against transformers' own, for every combination of YaRN fields."""

import math

import pytest
import torch

from eprt.config import RopeConfig
from eprt.layers.rope import cos_sin_table, softmax_scale

DIM = 64
YARN = {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096, "rope_theta": 10000.0}


def hf_table_and_scale(rope_parameters, num_positions):
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
        DeepseekV3Config,
        DeepseekV3RotaryEmbedding,
        yarn_apply_mscale,
    )

    config = DeepseekV3Config(
        qk_rope_head_dim=DIM, rope_parameters=dict(rope_parameters), max_position_embeddings=163840
    )
    cos, sin = DeepseekV3RotaryEmbedding(config)(torch.zeros(1), torch.arange(num_positions)[None])
    table = torch.cat((cos[0, :, : DIM // 2], sin[0, :, : DIM // 2]), dim=-1)
    return table, yarn_apply_mscale(config.rope_parameters, 192**-0.5)


@pytest.mark.parametrize(
    "fields",
    [
        {"rope_type": "default", "rope_theta": 10000.0},
        {"rope_type": "default", "rope_theta": 5e5},
        {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
        {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
        {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5},
        {**YARN},
        {**YARN, "attention_factor": 1.25},
        {**YARN, "beta_fast": 16.0, "beta_slow": 2.0, "factor": 4.0},
        {**YARN, "truncate": False, "mscale": 1.0, "mscale_all_dim": 1.0},
        {**YARN, "factor": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0},
    ],
    ids=lambda fields: "-".join(f"{k}={v}" for k, v in fields.items() if YARN.get(k) != v) or "yarn",
)
def test_table_and_scale_equal_transformers(fields):
    want, want_scale = hf_table_and_scale(fields, 20000)
    names = {"rope_theta": "theta", "rope_type": "kind"}
    rope = RopeConfig(**{names.get(k, k): v for k, v in fields.items()})
    torch.testing.assert_close(cos_sin_table(rope, DIM, 20000), want, rtol=0, atol=1e-6)
    assert softmax_scale(rope, 192) == pytest.approx(want_scale, rel=1e-12)


def test_v3_scale_is_the_published_one():
    """192^-0.5 * (0.1 ln 40 + 1)^2, cos and sin unscaled."""
    rope = RopeConfig(kind="yarn", factor=40.0, mscale=1.0, mscale_all_dim=1.0)
    assert softmax_scale(rope, 192) == pytest.approx(192**-0.5 * (0.1 * math.log(40) + 1) ** 2)
    assert cos_sin_table(rope, DIM, 1)[0, 0] == 1.0


def test_bad_values_are_refused():
    with pytest.raises(ValueError, match="rope type 'linear'"):
        RopeConfig(kind="linear")
    with pytest.raises(ValueError, match="factor=0"):
        RopeConfig(kind="yarn", factor=0)
