"""JoinedLinear: each matrix's product with the same normalised rows, whether they could be joined or not."""

import pytest
import torch

from eprt import ops
from eprt.layers.linear import JoinedLinear, Linear, as_format
from eprt.layers.norm import RMSNorm


@pytest.mark.parametrize(
    "weight_format, sizes, joins",
    [
        ("same", (24, 40), True),
        ("int8", (24, 40), True),
        ("fp8", (128, 40), True),
        ("fp8", (24, 128), False),  # a block of 128 rows would span both
        ("fp8", (256, 128, 7), True),
    ],
)
@pytest.mark.parametrize("biased", [(), (1,), (0, 1)])
def test_each_product_is_that_of_its_matrix_alone(weight_format, sizes, joins, biased):
    torch.manual_seed(0)
    norm, x_TK = RMSNorm(torch.rand(192), 1e-6), torch.randn(5, 192)
    parts = [
        Linear(as_format(torch.randn(n, 192), weight_format, torch.float32), torch.randn(n) if i in biased else None)
        for i, n in enumerate(sizes)
    ]
    joined = JoinedLinear(parts)
    assert (len(joined.parts) == 1) == joins
    for got, part in zip(joined.of_norm(x_TK, norm), parts, strict=True):
        assert torch.equal(got, ops.linear(norm(x_TK), part.weight, part.bias_N))
    assert [y.shape for y in joined.of_norm(x_TK[:0], norm)] == [(0, n) for n in sizes]


def test_matrices_of_different_formats_stay_apart():
    parts = [Linear(as_format(torch.randn(128, 64), kind, torch.float32)) for kind in ("fp8", "same")]
    assert len(JoinedLinear(parts).parts) == 2
