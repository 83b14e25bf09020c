"""Row-wise kernels against their oracles, on every instruction set of this CPU."""

import pytest
import torch

from eprt.ops import elementwise
from eprt.ops.elementwise import Rotation
from tests import reference_ops as reference

SIZES = [1, 2, 7, 16, 31, 64, 192, 577, 2048]


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def dtype(request):
    return request.param


def randn(*shape, dtype, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_rounds_like(got, want):
    """Equal up to the last bit or two of the dtype: both sides compute in fp32 and round once."""
    assert got.dtype == want.dtype and got.is_contiguous()
    rtol = 2e-6 if got.dtype == torch.float32 else 2**-7
    torch.testing.assert_close(got, want, rtol=rtol, atol=rtol * 0.1)
    if got.dtype == torch.bfloat16 and got.numel() > 1000:
        assert (got != want).float().mean() < 0.01


@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16], ids=["w32", "w16"])
def test_rms_norm(isa, dtype, weight_dtype):
    for size in SIZES:
        x = randn(5, size, dtype=dtype, seed=size) * torch.tensor([1.0, 1e-3, 30.0, 0.0, 1.0])[:, None].to(dtype)
        weight = randn(size, dtype=weight_dtype, seed=1)
        assert_rounds_like(elementwise.rms_norm(x, weight, 1e-6), reference.rms_norm(x, weight, 1e-6))


def test_rms_norm_takes_strided_rows(isa, dtype):
    """MLA norms the latent part of a wider projection in place."""
    x = randn(9, 96, dtype=dtype)[:, 16:80]
    weight = randn(64, dtype=dtype, seed=1)
    assert torch.equal(elementwise.rms_norm(x, weight, 1e-5), elementwise.rms_norm(x.contiguous(), weight, 1e-5))
    assert_rounds_like(elementwise.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))


def test_add_rms_norm_equals_the_two_steps(isa, dtype):
    for size in SIZES:
        x, residual = randn(4, 3 * size, dtype=dtype)[:, :size], randn(4, size, dtype=dtype, seed=1)
        weight = randn(size, dtype=dtype, seed=2)
        normed, total = elementwise.add_rms_norm(x, residual, weight, 1e-6)
        assert torch.equal(total, x + residual)
        assert torch.equal(normed, elementwise.rms_norm(x + residual, weight, 1e-6))
        assert_rounds_like(normed, reference.add_rms_norm(x, residual, weight, 1e-6)[0])


def test_silu_mul(isa, dtype):
    for size in SIZES:
        x = randn(6, 2 * size, dtype=dtype, seed=size) * 4
        assert_rounds_like(elementwise.silu_mul(x), reference.silu_mul(x))


def test_silu_mul_saturates(isa):
    gate = torch.tensor([-1e4, -200.0, -90.0, -1.0, 0.0, 1.0, 90.0, 200.0, 1e4, float("nan")])
    got = elementwise.silu_mul(torch.cat((gate, torch.ones(10)))[None])[0]
    torch.testing.assert_close(got, torch.nn.functional.silu(gate), rtol=2e-6, atol=1e-30, equal_nan=True)


@pytest.mark.parametrize("interleaved", [True, False], ids=["interleaved", "half"])
def test_rope(isa, dtype, interleaved):
    for size in (2, 6, 16, 64, 130):
        angle = torch.arange(50)[:, None] * 0.7 ** torch.arange(size // 2)
        cos_sin = torch.cat((angle.cos(), angle.sin()), dim=-1)
        rotation = Rotation(cos_sin, torch.tensor([0, 49, 3, 3, 17]), interleaved)
        x = randn(5, 3, size + 10, dtype=dtype, seed=size)[..., 10:]
        got, want = elementwise.rope(x, rotation), reference.rope(x, rotation)
        torch.testing.assert_close(got, want, rtol=0, atol=1e-6 if dtype == torch.float32 else 0.02)


def test_both_layouts_give_the_same_scores():
    """Interleaved pairs, and the same values de-interleaved and rotated as halves, agree in every product q.k."""
    angle = torch.arange(30)[:, None] * 0.5 ** torch.arange(8)
    cos_sin, position = torch.cat((angle.cos(), angle.sin()), dim=-1), torch.arange(30)
    q, k = randn(30, 2, 16, dtype=torch.float32), randn(30, 2, 16, dtype=torch.float32, seed=1)
    deinterleave = torch.cat((torch.arange(0, 16, 2), torch.arange(1, 16, 2)))
    scores = []
    for interleaved, order in ((True, torch.arange(16)), (False, deinterleave)):
        rotation = Rotation(cos_sin, position, interleaved)
        turned = elementwise.rope(q[..., order], rotation), elementwise.rope(k[..., order], rotation)
        scores.append(torch.einsum("qnr,knr->nqk", *turned))
    torch.testing.assert_close(*scores)


def test_rows_do_not_depend_on_each_other(isa, dtype):
    """Any row alone has the same bits as in a batch, on one thread and on two."""
    x, weight = randn(40, 1024, dtype=dtype), randn(1024, dtype=dtype, seed=1)
    angle = torch.arange(40)[:, None] * 0.9 ** torch.arange(32)
    cos_sin = torch.cat((angle.cos(), angle.sin()), dim=-1)
    for run in (
        lambda rows: elementwise.rms_norm(x[rows], weight, 1e-6),
        lambda rows: elementwise.silu_mul(x[rows]),
        lambda rows: elementwise.rope(x[rows].view(-1, 16, 64), Rotation(cos_sin, torch.arange(40)[rows], True)),
    ):
        alone = torch.cat([run(slice(i, i + 1)) for i in range(40)])
        threads = torch.get_num_threads()
        try:
            torch.set_num_threads(2)
            assert torch.equal(run(slice(None)), alone)
        finally:
            torch.set_num_threads(threads)


def test_empty_batch(dtype):
    rotation = Rotation(torch.zeros(4, 8), torch.zeros(0, dtype=torch.int64), False)
    assert elementwise.rms_norm(randn(0, 8, dtype=dtype), randn(8, dtype=dtype), 1e-6).shape == (0, 8)
    assert elementwise.silu_mul(randn(0, 8, dtype=dtype)).shape == (0, 4)
    assert elementwise.rope(randn(0, 2, 8, dtype=dtype), rotation).shape == (0, 2, 8)


def rope_half(x, table_size, *position):
    return elementwise.rope(x[None], Rotation(torch.ones(4, table_size), torch.tensor(position), False))


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda x: elementwise.rms_norm(x, torch.ones(7), 1e-6), r"weight has shape \(7,\), must be \[8\]"),
        (lambda x: elementwise.rms_norm(x.half(), torch.ones(8), 1e-6), "x is torch.float16"),
        (lambda x: elementwise.add_rms_norm(x, x.bfloat16(), torch.ones(8), 1e-6), "must be the same"),
        (lambda x: elementwise.silu_mul(x[:, :7]), "7 columns, must be even"),
        (lambda x: rope_half(x, 8, 4), r"position\[0\] = 4 is outside"),
        (lambda x: rope_half(x, 8, -1), r"position\[0\] = -1"),
        (lambda x: rope_half(x, 6, 0), r"must be .*\[positions, 8\]"),
        (lambda x: rope_half(x, 8, 0, 0), r"must be torch.int64 \[1\]"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call(torch.ones(3, 8))
