"""The layers that are compared compute the same: transformers' block and EPMoE.from_hf, tiny, on the CPU."""

import pytest
import torch

from benchmarks.gpu.bench_hf_moe import EAGER, HfCase
from benchmarks.gpu.hf_blocks import DEEPSEEK_V3, QWEN3_235B, SHAPES
from eprt import EPGroup

pytest.importorskip("transformers")

TINY = {
    "deepseek_v3": {"hidden_size": 256, "moe_intermediate_size": 128, "n_routed_experts": 32},
    "qwen3_235b": {"hidden_size": 256, "moe_intermediate_size": 128, "num_experts": 32},
}


@pytest.mark.parametrize("name", SHAPES)
@torch.inference_mode()
def test_every_way_to_compute_the_layer_gives_the_same(name):
    shape = SHAPES[name]._replace(sizes=SHAPES[name].sizes | TINY[name])
    case = HfCase(EPGroup.single(), name, shape, ["same", "fp8"], device="cpu")
    x = torch.randn(1, 8, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    calls = case.calls(8, ["eager", "grouped_mm", "batched_mm"])
    assert next(iter(calls)) == EAGER and {"eprt normal", "eprt low_latency", "eprt fp8 normal"} <= set(calls)
    assert "eprt low_latency" not in case.calls(200, []) and "eprt normal" in case.calls(200, [])
    want = calls[EAGER](x).float()
    for what, call in calls.items():
        apart = (call(x).float() - want).norm() / want.norm()
        assert apart < (0.1 if "fp8" in what else 0.02), what
    experts = 32 * 3 * 256 * 128
    assert case.weights_bytes("transformers eager") - 2 * experts == case.weights_bytes("eprt fp8 normal") - experts * (
        1 + 4 / 128**2
    )
    case.close()


@torch.inference_mode()
def test_the_floor_is_bytes_for_few_tokens_and_operations_for_many():
    shape = QWEN3_235B._replace(sizes=QWEN3_235B.sizes | TINY["qwen3_235b"])
    case = HfCase(EPGroup.single(), "qwen3_235b", shape, [], device="cpu")
    expert, gate, rate = 3 * 256 * 128, 32 * 256, 1e15
    one_token = 2 * (8 * expert + gate) / 1e12  # eight experts' weights
    assert case.floor_s(1, 1e12, rate) == pytest.approx(one_token)
    assert case.floor_s(100_000, 1e12, rate) == pytest.approx(2 * 100_000 * (8 * expert + gate) / rate)
    case.close()


def test_published_sizes():
    assert (DEEPSEEK_V3.sizes["hidden_size"], DEEPSEEK_V3.sizes["n_routed_experts"]) == (7168, 256)
    assert (QWEN3_235B.sizes["hidden_size"], QWEN3_235B.sizes["num_experts"]) == (4096, 128)
