"""Gate, up and down of an expert, however a block stores them."""

import pytest
import torch
from torch import nn

from eprt.compat.hf.weights import expert_reader, expert_shape, fp8_weight
from eprt.ops.weight import Weight, quantize_fp8
from tests import tiny


class Fused(nn.Module):
    """Experts as two 3-D parameters, in fp8."""

    def __init__(self, gate_up: list[Weight], down: list[Weight]):
        super().__init__()
        for name, weights in (("gate_up_proj", gate_up), ("down_proj", down)):
            data, scale = torch.stack([w.data for w in weights]), torch.stack([w.scale for w in weights])
            setattr(self, name, nn.Parameter(data, requires_grad=False))
            setattr(self, f"{name}_scale_inv", nn.Parameter(scale, requires_grad=False))


def values(matrix) -> torch.Tensor:
    return matrix.dequantize() if isinstance(matrix, Weight) else matrix


@pytest.mark.parametrize("size", [128, 256])
def test_fp8_of_whole_blocks_is_cut_bit_for_bit(size):
    gate_up, down = quantize_fp8(torch.randn(2 * size, 130)), quantize_fp8(torch.randn(130, size))
    gate, up, third = expert_reader(Fused([gate_up], [down]))(0)
    assert isinstance(gate, Weight) and isinstance(up, Weight) and isinstance(third, Weight)
    assert torch.equal(torch.cat((gate.dequantize(), up.dequantize())), gate_up.dequantize())
    assert torch.equal(third.dequantize(), down.dequantize())


def test_fp8_scales_of_gate_and_up_behind_each_other():
    """48 rows each: one block of their own, as checkpoints have them, though both would fit into one."""
    parts = [quantize_fp8(torch.randn(48, 64)) for _ in range(2)]
    fused = Weight.__new__(Weight)  # two rows of scales, where a matrix by itself would have one
    object.__setattr__(fused, "data", torch.cat([part.data for part in parts]))
    object.__setattr__(fused, "scale", torch.cat([part.scale for part in parts]))
    gate, up, _ = expert_reader(Fused([fused], [quantize_fp8(torch.randn(64, 48))]))(0)
    assert torch.equal(values(gate), parts[0].dequantize()) and torch.equal(values(up), parts[1].dequantize())


def test_an_fp8_block_that_spans_gate_and_up_keeps_its_values():
    gate_up = quantize_fp8(torch.randn(2 * 192, 64))
    gate, up, _ = expert_reader(Fused([gate_up], [quantize_fp8(torch.randn(64, 192))]))(0)
    assert torch.equal(torch.cat((values(gate), values(up))), gate_up.dequantize())


def test_one_scale_for_a_whole_matrix_and_scales_in_e8m0():
    data = torch.randn(200, 150).to(torch.float8_e4m3fn)
    assert torch.equal(fp8_weight(data, torch.tensor(0.5)).dequantize(), data.float() * 0.5)
    powers = torch.tensor([[0.5, 2.0], [4.0, 1.0]]).to(torch.float8_e8m0fnu)
    assert torch.equal(fp8_weight(data, powers).dequantize()[130, 3:5], data.float()[130, 3:5] * 4)


def test_lists_of_modules_and_fused_parameters_say_the_same():
    for family, names in (("qwen3", None), ("mixtral", ("w1", "w3", "w2"))):
        block = tiny.make_moe_block(family)
        old = tiny.OldStyleBlock(block, names)
        assert expert_shape(old.experts) == expert_shape(block.experts)
        for one, other in zip(expert_reader(old.experts)(3), expert_reader(block.experts)(3)):
            assert torch.equal(values(one), values(other))
