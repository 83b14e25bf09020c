"""Norm and rotation of rows against torch, at every instruction set of this machine; each row by itself."""

import pytest
import torch

from eprt.ops import native
from eprt.ops.elementwise import Rotation
from eprt.ops.turned_rows import RowNorm, turn_rows

native.load()
LEVELS = native.ISA_NAMES[: native.ISA_NAMES.index(native.detected_isa()) + 1][:3]
DTYPES = (torch.float32, torch.bfloat16)
TABLE = torch.randn(50, 14, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True, params=LEVELS)
def isa(request):
    before = native.isa()
    native.set_isa(request.param)
    yield
    native.set_isa(before)


def rows(dtype: torch.dtype, num: int = 9) -> torch.Tensor:
    """[num, 3, 37], heads and rows apart in memory."""
    return torch.randn(num, 5, 40, generator=torch.Generator().manual_seed(1)).to(dtype)[:, 1:4, :37]


def rotation(num: int = 9) -> Rotation:
    return Rotation(TABLE, torch.arange(num) * 5 % 50, True)


def expected(x: torch.Tensor, turn: Rotation, norm: RowNorm | None, backwards: bool) -> torch.Tensor:
    y = x.float()
    if norm is not None:
        y = y / (y.square().mean(-1, keepdim=True) + norm.eps).sqrt()
        y = (y if norm.weight_D is None else y * norm.weight_D.float()).to(x.dtype).float()
    cos, sin = turn.cos_sin_PR[turn.position_T].unsqueeze(1).chunk(2, dim=-1)
    even, odd = y[..., 23::2], y[..., 24::2]
    sin = -sin if backwards else sin
    pairs = torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2)
    return torch.cat((y[..., :23], pairs), dim=-1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("out_dtype", DTYPES)
@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize("weight", ["no norm", None, *DTYPES])
def test_rows_equal_the_formula(dtype, out_dtype, backwards, weight):
    x = rows(dtype)
    values = torch.randn(37, generator=torch.Generator().manual_seed(2))
    norm = None if weight == "no norm" else RowNorm(1e-5, None if weight is None else values.to(weight))
    got = turn_rows(x, rotation(), norm, backwards, out_dtype)
    want = expected(x, rotation(), norm, backwards)
    exact = dtype == out_dtype == torch.float32
    assert got.dtype == out_dtype and got.is_contiguous()
    rtol = 1e-5 if exact or (norm is None and out_dtype == torch.float32) else 1e-2
    torch.testing.assert_close(got.float(), want, rtol=rtol, atol=rtol)


def test_a_row_is_its_own():
    x, norm = rows(torch.bfloat16, 200), RowNorm(1e-6)
    whole = turn_rows(x, rotation(200), norm)
    for i in (0, 77, 199):
        one = Rotation(TABLE, rotation(200).position_T[i : i + 1], True)
        assert torch.equal(turn_rows(x[i : i + 1], one, norm), whole[i : i + 1])
    assert turn_rows(x[:0], rotation(0)).shape == (0, 3, 37)


def test_what_does_not_fit_is_refused():
    x, turn = rows(torch.float32), rotation()
    with pytest.raises(ValueError, match=r"position\[3\] = 50 is outside the 50"):
        turn_rows(x, Rotation(TABLE, torch.tensor([0, 1, 2, 50, 4, 5, 6, 7, -1]), True))
    with pytest.raises(ValueError, match="must be contiguous"):
        turn_rows(x, Rotation(TABLE, turn.position_T.int(), True))
    with pytest.raises(ValueError, match="pairs must be interleaved"):
        turn_rows(x, Rotation(TABLE, turn.position_T, False))
    with pytest.raises(ValueError, match="14 of 6 values"):
        turn_rows(x[..., :6], turn)
    with pytest.raises(ValueError, match=r"must be \[37\] like the rows"):
        turn_rows(x, turn, RowNorm(1e-6, torch.ones(36)))
    with pytest.raises(ValueError, match=r"must be \[T, N, D\]"):
        turn_rows(x.double(), turn)
