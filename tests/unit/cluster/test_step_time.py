"""Predicted steps against measured ones."""

import json
from dataclasses import replace

import pytest

from eprt.cluster.cluster_layout import ClusterLayout
from eprt.cluster.model_cost import ModelCost
from eprt.cluster.step_time import Workload, decode_step, prefill_tokens_per_s
from tests.unit.cluster.cases import deepseek_v3
from tests.unit.cluster.test_gpu_speed import RESULTS, rows


def measured_share() -> tuple[ClusterLayout, ModelCost, int]:
    """What bench_generation runs: two GPUs, each with an eighth of V3's experts and 2 copies."""
    config = deepseek_v3().config
    assert config.moe is not None
    moe = replace(config.moe, num_experts=64, n_group=1, topk_group=1)
    return ClusterLayout(1, 2), ModelCost(replace(config, moe=moe)), 34


@pytest.mark.parametrize("requests", [64, 96, 128])
def test_a_decode_step_is_as_measured(requests):
    """One figure, other_us_per_request, makes 128 requests right; the others are predicted."""
    layout, model, slots = measured_share()
    file = json.loads((RESULTS / "generation_61x64_2gpu.json").read_text())
    row = next(row for row in rows("generation_61x64_2gpu", what="decode", requests=requests) if row["ahead"])
    work = Workload(requests, prompt=file["config"]["context"] - 1, output=2)
    step = decode_step(layout, model, 2, slots, work)
    assert step.step_ms == pytest.approx(row["mean_ms"], rel=0.08)


def test_a_prompt_is_as_measured():
    (row,) = rows("layer_prefill_2gpu", tokens=8192)
    layout, model, _ = measured_share()
    layers = model.config.num_hidden_layers
    got = prefill_tokens_per_s(layout, model, 2, Workload(prompt=1024, prefill_tokens=8192))
    assert got == pytest.approx(row["none_tokens_per_s"] / layers, rel=0.05)


def test_a_slow_network_bounds_the_step():
    model, work = deepseek_v3(), Workload()
    steps = [decode_step(ClusterLayout(4, nic_GBps=speed), model, 32, 8, work) for speed in (400, 50, 12, 3)]
    assert [step.step_ms for step in steps] == sorted(step.step_ms for step in steps)
    assert steps[-1].step_ms > steps[-1].compute_ms  # the exchange no longer fits beside the kernels
    assert all(step.step_ms <= step.compute_ms + step.exchange_ms for step in steps)


@pytest.mark.parametrize(
    "field, flag",
    [
        ("requests", "--requests"),
        ("prompt", "--prompt"),
        ("output", "--output"),
        ("prefill_tokens", "--prefill-tokens"),
    ],
)
def test_bad_workloads_are_named(field, flag):
    with pytest.raises(ValueError, match=f"{flag} 0: must be at least 1"):
        Workload(**{field: 0})
