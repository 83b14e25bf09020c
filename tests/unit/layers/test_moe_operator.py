"""EPMoE as one operator of compiled programs: no graph break, any number of tokens, several layers, tuples."""

import gc
import shutil

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from tests.unit.layers.cases import NUM_EXPERTS, WIDTH, filled

BACKENDS = [
    "eager",
    "aot_eager",
    pytest.param(
        "inductor", marks=pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler")
    ),
]


@pytest.fixture(autouse=True)
def no_programs_of_other_tests():
    torch._dynamo.reset()


class Block(nn.Module):
    def __init__(self, moe):
        super().__init__()
        self.mlp = moe

    def forward(self, x_TH):
        return x_TH + torch.relu(self.mlp(x_TH) * 2)


@pytest.mark.parametrize("backend", BACKENDS)
@torch.no_grad()
def test_compiled_with_any_number_of_tokens(backend):
    block = Block(filled()).eval()
    program = torch.compile(block, fullgraph=True, backend=backend, dynamic=True)
    counted = []
    for shape in ((5, WIDTH), (7, WIDTH), (1, WIDTH), (0, WIDTH), (19, WIDTH)):
        x_TH = torch.randn(shape)
        torch.testing.assert_close(program(x_TH), block(x_TH))
        counted.append(sum(block.mlp.expert_load()))
    assert counted == [20, 48, 52, 52, 128]  # two experts a token, compiled and not


@torch.no_grad()
def test_calls_are_neither_dropped_nor_merged():
    """A rank that left one out would keep the others waiting."""
    moe = filled()

    def program(x_TH):
        moe(x_TH)
        return moe(x_TH) + moe(x_TH)

    x_TH = torch.randn(3, WIDTH)
    y_TH = torch.compile(program, fullgraph=True, backend="aot_eager")(x_TH)
    assert sum(moe.expert_load()) == 3 * 3 * 2
    assert torch.equal(y_TH, 2 * moe(x_TH))


@torch.no_grad()
def test_layers_of_one_shape_share_a_program():
    counter = CompileCounterWithBackend("aot_eager")
    blocks = [Block(filled(seed=seed)).eval() for seed in range(12)]
    x_TH = torch.randn(4, WIDTH)
    for block in blocks:
        assert torch.equal(torch.compile(block, fullgraph=True, backend=counter)(x_TH), block(x_TH))
    assert counter.frame_count == 1


@pytest.mark.parametrize("backend", BACKENDS)
@torch.no_grad()
def test_router_logits_beside(backend):
    moe = filled()
    moe.returns_router_logits = True
    program = torch.compile(moe, fullgraph=True, backend=backend, dynamic=True)
    for num in (4, 6):
        x_TH = torch.randn(2, num, WIDTH)
        (y_TH, logits_TE), (want_TH, want_TE) = program(x_TH), moe(x_TH)
        assert logits_TE.shape == (2 * num, NUM_EXPERTS)
        assert torch.equal(y_TH, want_TH) and torch.equal(logits_TE, want_TE)


@torch.no_grad()
def test_token_ids_and_the_mode_are_passed_on():
    moe = filled()
    program = torch.compile(moe, fullgraph=True, backend="aot_eager")
    x_TH, token_id_T = torch.randn(4, WIDTH), torch.tensor([5, -1, 0, -1])
    assert torch.equal(program(x_TH, token_id_T, mode="normal"), moe(x_TH, token_id_T))
    with pytest.raises(ValueError, match="mode='low_latency': this layer was built for normal"):
        program(x_TH, token_id_T, mode="low_latency")


@torch.no_grad()
def test_strided_rows_and_inference_mode():
    moe = filled()
    program = torch.compile(moe, fullgraph=True, backend="aot_eager")
    x_TH = torch.randn(WIDTH, 6).T
    assert torch.equal(program(x_TH), moe(x_TH.contiguous()))
    with torch.inference_mode():
        assert torch.equal(program(x_TH), moe(x_TH))


def test_training_is_refused_by_a_compiled_program_too():
    moe = filled().train()
    program = torch.compile(moe, backend="aot_eager")
    with pytest.raises(RuntimeError, match="computes no gradients"):
        program(torch.randn(2, WIDTH, requires_grad=True))


@torch.no_grad()
def test_an_exported_program_runs_while_its_layer_lives():
    moe, x_TH = filled(), torch.randn(3, WIDTH)
    program = torch.export.export(moe, (x_TH,)).module()
    assert torch.equal(program(x_TH), moe(x_TH))
    del moe
    gc.collect()
    with pytest.raises(RuntimeError, match=r"EPMoE number \d+, which this process does not have"):
        program(x_TH)


@torch.no_grad()
def test_the_operator_is_what_torch_expects():
    moe, x_TH = filled(), torch.randn(3, WIDTH)
    samples = (x_TH, None, moe._number, None)
    torch.library.opcheck(torch.ops.eprt.moe.default, samples, test_utils=("test_schema", "test_faketensor"))
