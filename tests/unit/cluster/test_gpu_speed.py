"""The speeds against the result files that they are said to be of."""

import json
from pathlib import Path

import pytest

from eprt.cluster.cluster_layout import ClusterLayout
from eprt.cluster.crossings import ExpertChoice, parts_elsewhere
from eprt.cluster.gpu_speed import H200
from tests.unit.cluster.cases import deepseek_v3

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"


def rows(name: str, **fields) -> list[dict]:
    found = json.loads((RESULTS / f"{name}.json").read_text())["rows"]
    return [row for row in found if all(row[key] == value for key, value in fields.items())]


@pytest.mark.parametrize("num_rows", [8, 32, 64, 128, 512])
def test_experts(num_rows):
    (row,) = rows("gpu_layers_h200", what="experts fp8", rows=num_rows)
    num_bytes, flops = row["floor_us"] * 4446e3, row["tflops"] * row["eprt_us"] * 1e6
    assert H200.expert_us(num_bytes, flops) == pytest.approx(row["eprt_us"], rel=0.07)


@pytest.mark.parametrize("num_rows", [32, 4096])
def test_products(num_rows):
    (row,) = rows("gpu_layers_h200", what="linear fp8 7168x16384", rows=num_rows)
    values = 7168 * 16384
    assert H200.linear_us(values, 2.0 * num_rows * values) == pytest.approx(row["eprt_us"], rel=0.05)


def test_attention():
    (row,) = rows("latent_attention_h200", what="128 x 4096, eprt")
    model = deepseek_v3()
    num_bytes, flops = 128 * 4096 * 576 * 2, 128 * model.attention_flops(4096)
    assert H200.attention_us(num_bytes, flops) == pytest.approx(row["eprt_us"], rel=0.02)


@pytest.mark.parametrize("ranks", [2, 4])
def test_low_latency(ranks):
    model, copies = deepseek_v3(), 128 * parts_elsewhere(ExpertChoice(288, 8), ranks)
    (dispatch,) = rows(f"ep_low_latency_{ranks}gpu", tokens=128, call="dispatch fp8")
    (combine,) = rows(f"ep_low_latency_{ranks}gpu", tokens=128, call="combine bf16")
    assert H200.dispatch.us(copies * model.dispatch_bytes) == pytest.approx(dispatch["eprt_us"], rel=0.02)
    assert H200.combine.us(copies * model.combine_bytes) == pytest.approx(combine["eprt_us"], rel=0.02)


def test_normal():
    model, copies = deepseek_v3(), 4096 * parts_elsewhere(ExpertChoice(256, 8), 4)
    (dispatch,) = rows("ep_normal_4gpu", tokens=4096, call="dispatch fp8 whole")
    (combine,) = rows("ep_normal_4gpu", tokens=4096, call="combine bf16")
    assert copies * model.dispatch_bytes / H200.normal_dispatch_GBps * 1e-3 == pytest.approx(
        dispatch["eprt_us"], rel=0.02
    )
    assert copies * model.combine_bytes / H200.normal_combine_GBps * 1e-3 == pytest.approx(combine["eprt_us"], rel=0.02)


def test_unknown_gpus_are_refused():
    with pytest.raises(ValueError, match="--gpu 'b200': must be one of h200, h800"):
        ClusterLayout(2, gpu="b200")
