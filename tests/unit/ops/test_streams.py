"""Hyper-connections of every instruction set against the formulas; rows are computed alone."""

from typing import Any

import pytest
import torch

from eprt.ops.streams import StreamProjection, collapse_streams, expand_streams, mix_streams
from tests import reference_v4 as reference


def projection(streams: int, size: int, outputs: int, num_scales: int) -> StreamProjection:
    generator = torch.Generator().manual_seed(streams * size)
    fn = torch.randn(outputs, streams * size, generator=generator) / (streams * size) ** 0.5
    scale = torch.rand(num_scales, generator=generator) + 0.5
    return StreamProjection(fn, torch.randn(outputs, generator=generator), scale, 1e-6, 1e-6, 20)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("streams", "size", "rows"), [(4, 256, 9), (4, 37, 3), (2, 5, 70), (1, 16, 1), (4, 8, 0)])
def test_kernels_equal_the_formulas(isa, dtype, streams, size, rows):
    p = projection(streams, size, streams * (2 + streams), 3)
    x = torch.randn(rows, streams, size, generator=torch.Generator().manual_seed(1)).to(dtype)
    tolerance: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 1e-2, "atol": 1e-2}
    got, want = mix_streams(x, p), reference.mix_streams(x, p)
    torch.testing.assert_close(got[0], want[0], **tolerance)
    for one, other in zip(got[1:], want[1:]):
        torch.testing.assert_close(one, other, rtol=2e-5, atol=2e-5)
    y = torch.randn(rows, size).to(dtype)
    expanded = (got[1] + got[2].unsqueeze(2) * y.float().unsqueeze(1)).to(dtype)
    torch.testing.assert_close(expand_streams(got[1], got[2], y), expanded, **tolerance)
    head = projection(streams, size, streams, 1)
    torch.testing.assert_close(collapse_streams(x, head), reference.collapse_streams(x, head), **tolerance)


def test_a_row_has_the_same_bits_in_any_batch(isa):
    p, x = projection(4, 264, 24, 3), torch.randn(70, 4, 264, generator=torch.Generator().manual_seed(1))
    whole = mix_streams(x, p)
    for part in (slice(0, 1), slice(5, 8), slice(69, 70)):
        for alone, together in zip(mix_streams(x[part], p), whole):
            assert torch.equal(alone, together[part])


def test_what_does_not_fit_is_refused():
    p, x = projection(4, 8, 24, 3), torch.randn(2, 4, 8)
    with pytest.raises(ValueError, match=r"have shapes .* must be \(\(4, 32\), \(4,\), \(1,\)\)"):
        collapse_streams(x, p)
    with pytest.raises(ValueError, match=r"there are 17 streams, more than 16"):
        mix_streams(torch.randn(1, 17, 2), p)
    with pytest.raises(ValueError, match=r"x is torch.float64 \(2, 4, 8\)"):
        mix_streams(x.double(), p)
    _, mixed, post = mix_streams(x, p)
    with pytest.raises(ValueError, match=r"y is torch.float32 \(3, 8\), not \[2, 8\]"):
        expand_streams(mixed, post, torch.randn(3, 8))
