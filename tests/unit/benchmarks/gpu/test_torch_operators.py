"""The operators in plain torch compute what eprt.ops computes: otherwise the benchmark compares different work."""

import pytest
import torch

from benchmarks.gpu import torch_operators
from eprt import ops
from eprt.ep.reference import dequantize, quantize
from eprt.ops.elementwise import Rotation
from eprt.ops.gate import GateRule

ROWS = [1, 7]


def random(*shape: int, dtype=torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def assert_equal_to_the_last_bits(got: torch.Tensor, want: torch.Tensor):
    assert got.dtype == want.dtype and got.shape == want.shape
    torch.testing.assert_close(got.float(), want.float(), rtol=2**-7, atol=1e-6)


@pytest.mark.parametrize("rows", ROWS)
def test_norms(rows):
    x, residual, weight = random(rows, 384), random(rows, 384) + 1, random(384)
    assert_equal_to_the_last_bits(torch_operators.rms_norm(x, weight, 1e-6), ops.rms_norm(x, weight, 1e-6))
    got = torch_operators.add_rms_norm(x, residual, weight, 1e-6)
    for one, want in zip(got, ops.add_rms_norm(x, residual, weight, 1e-6), strict=True):
        assert_equal_to_the_last_bits(one, want)


@pytest.mark.parametrize("rows", ROWS)
def test_silu_and_sum(rows):
    x = random(rows, 512)
    assert_equal_to_the_last_bits(torch_operators.silu_mul(x), ops.silu_mul(x))
    y, z = random(rows, 512) + 1, random(rows, 512) - 1
    assert torch.equal(torch_operators.add_rows(x, y, z), ops.add_rows(x, y, z))


@pytest.mark.parametrize("rows", ROWS)
def test_quantised_rows_and_what_is_quantised_at_once(rows):
    x, weight = random(rows, 512), random(512)
    x[0, :128] = 0  # a group of zeros divides by no zero
    data, scale = torch_operators.quantize_rows(x)
    want_data, want_scale = quantize(x)
    torch.testing.assert_close(scale, want_scale, rtol=1e-6, atol=1e-12)
    assert torch.equal(data.float(), want_data.float())
    for (data, scale), want in (
        (torch_operators.rms_norm_quantize(x, weight, 1e-6), ops.rms_norm(x, weight, 1e-6)),
        (torch_operators.silu_mul_quantize(x), ops.silu_mul(x)),
    ):
        assert data.dtype == torch.float8_e4m3fn
        torch.testing.assert_close(dequantize(data, scale), want.float(), rtol=0.07, atol=0.01)


@pytest.mark.parametrize("interleaved", [True, False])
def test_rotary(interleaved):
    x, table = random(5, 3, 64), random(11, 64, dtype=torch.float32)
    rotation = Rotation(table, torch.tensor([0, 10, 3, 3, 7]), interleaved)
    assert_equal_to_the_last_bits(torch_operators.rope(x, rotation), ops.rope(x, rotation))


@pytest.mark.parametrize("normalise", [True, False])
def test_gate(normalise):
    rule = GateRule("sigmoid", 8, 8, 4, normalise, 2.5)
    logits, bias = random(33, 256, dtype=torch.float32), random(256, dtype=torch.float32) / 10
    weights, chosen = torch_operators.gate_topk(logits, bias, rule)
    want_weights, want_chosen = ops.gate_topk(logits, bias, rule)
    assert torch.equal(chosen, want_chosen)
    torch.testing.assert_close(weights, want_weights)
