"""group_linear: each group's columns times its own matrix, in every format."""

import pytest
import torch

from eprt import ops
from eprt.ops.weight import Weight, quantize_fp8, quantize_int8


@pytest.mark.parametrize("quantise", [Weight, quantize_fp8, quantize_int8])
@pytest.mark.parametrize("rows", [0, 1, 5])
def test_groups_are_products_of_their_own(quantise, rows):
    weight = quantise(torch.randn(3, 128, 64))
    x = torch.randn(rows, 3 * 64)
    got = ops.group_linear(x, weight)
    want = torch.einsum("tgk,gnk->tgn", x.view(rows, 3, 64), weight.dequantize()).flatten(1)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    for i in range(3):
        assert torch.equal(got[:, 128 * i : 128 * (i + 1)], ops.linear(x[:, 64 * i : 64 * (i + 1)], weight.matrix(i)))


def test_other_columns_are_refused():
    with pytest.raises(ValueError, match="x has 65 columns, 3 groups of 64 are 192"):
        ops.group_linear(torch.randn(2, 65), Weight(torch.randn(3, 128, 64)))
