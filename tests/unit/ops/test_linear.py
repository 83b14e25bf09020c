"""The CPU matrix kernels, at every instruction set of this machine, against their oracles and against themselves."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eprt.ops import Weight, grouped_experts, linear, native, quantize_fp8, quantize_int8
from eprt.ops.weight import quantize_fp4
from tests import reference_ops as reference

native.load()
LEVELS = native.ISA_NAMES[: native.ISA_NAMES.index(native.detected_isa()) + 1]
if LEVELS[-1] == "avx512":
    LEVELS = (*LEVELS, "emulated amx")
X_DTYPES = (torch.float32, torch.bfloat16)
WEIGHTS = {
    "float32": Weight,
    "bfloat16": lambda w: Weight(w.bfloat16()),
    "fp8": quantize_fp8,
    "int8": quantize_int8,
}
# (N, K): single elements, below and above a vector, a tile, an fp8 block, a stretch of K; multiples of none of them.
SHAPES = ((1, 1), (3, 31), (7, 32), (49, 128), (130, 257), (200, 384), (33, 1100), (65, 2500), (17, 4224))


def set_level(level: str) -> None:
    emulated = level == "emulated amx"
    native.set_isa("avx512" if emulated else level)
    torch.ops.eprt.emulate_amx(emulated)


@pytest.fixture(params=LEVELS)
def isa(request):
    before = native.isa()
    set_level(request.param)
    yield request.param
    set_level(before)


@pytest.fixture(params=X_DTYPES, ids=lambda d: str(d)[6:])
def x_dtype(request):
    return request.param


@pytest.fixture(params=WEIGHTS)
def make_weight(request):
    return WEIGHTS[request.param]


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def assert_rounding_apart(got: torch.Tensor, want: torch.Tensor, magnitude: torch.Tensor, hidden_rounding=0.0):
    """Within the rounding of got's dtype, of fp32 sums, and of hidden_rounding * sum |x| |w|. want is fp32."""
    output_rounding = 2**-8 if got.dtype == torch.bfloat16 else 2**-24
    allowed = output_rounding * want.float().abs() + (2**-20 + hidden_rounding) * magnitude + 1e-30
    excess = (got.float() - want.float()).abs() - allowed
    assert (excess <= 0).all(), f"worst excess {excess.max():.3g} at {excess.argmax().item()}"


def quantises_rows(level: str, x: torch.Tensor, w: Weight) -> bool:
    """Whether the kernels multiply int8 by int8: AMX, where both sides are narrow."""
    return level.endswith("amx") and x.dtype == torch.bfloat16 and w.data.dtype == torch.int8


def oracle(level: str, x: torch.Tensor, w: Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """fp32"""
    linear_of = reference.int8_linear if quantises_rows(level, x, w) else reference.linear
    return linear_of(x.float(), w, bias)


# ---- linear ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_linear_matches_oracle(isa, x_dtype, make_weight, shape):
    n, k = shape
    w = make_weight(random(n, k, seed=1))
    bias = random(n, seed=2)
    for m in (1, 2, 3, 4, 5, 8, 67):
        x = random(m, k, seed=m).to(x_dtype)
        magnitude = x.float().abs() @ w.dequantize().abs().T + bias.abs()
        assert_rounding_apart(linear(x, w), oracle(isa, x, w), magnitude)
        assert_rounding_apart(linear(x, w, bias), oracle(isa, x, w, bias), magnitude)


@pytest.mark.parametrize("shape", ((130, 257), (49, 2500), (17, 4224)), ids=str)
def test_row_is_independent_of_batch(isa, x_dtype, make_weight, shape):
    n, k = shape
    w = make_weight(random(n, k, seed=1))
    x = random(150, k, seed=2).to(x_dtype)
    alone = torch.cat([linear(x[i : i + 1], w) for i in range(150)])
    for m in (*range(2, 20), 63, 64, 65, 127, 128, 129, 150):
        assert torch.equal(linear(x[:m], w), alone[:m]), f"M={m}"
    assert torch.equal(linear(x[37:137], w), alone[37:137]), "rows at another place"
    assert torch.equal(linear(x.flip(0).contiguous(), w), alone.flip(0)), "rows in another order"


def test_value_is_independent_of_threads(isa, x_dtype, make_weight):
    w, x = make_weight(random(700, 520, seed=1)), random(70, 520, seed=2).to(x_dtype)
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            results.append((linear(x, w), linear(x[:1], w)))
    finally:
        torch.set_num_threads(threads)
    for many, one in results[1:]:
        assert torch.equal(many, results[0][0]) and torch.equal(one, results[0][1])


def test_strided_rows(isa, x_dtype, make_weight):
    w = make_weight(random(50, 100, seed=1))
    wide = random(9, 333, seed=2).to(x_dtype)
    for x in (wide[:, 7:107], wide[::2, 7:107], random(100, 9, seed=3).to(x_dtype).T, wide[:1, :100].expand(9, 100)):
        assert torch.equal(linear(x, w), linear(x.contiguous(), w))


def test_more_rows_than_are_packed_at_once(isa, x_dtype):
    w, x = Weight(random(40, 70, seed=1).bfloat16()), random(2100, 70, seed=2).to(x_dtype)
    y = linear(x, w)
    assert torch.equal(y[1000:1100], linear(x[1000:1100], w))
    assert_rounding_apart(y, reference.linear(x.float(), w), x.float().abs() @ w.dequantize().abs().T)


def test_nothing_leaks_between_rows_or_columns(isa, x_dtype):
    """A NaN or infinity stays in its own row of x and of W, also where K or N ends inside a vector."""
    x, data = random(9, 45, seed=1).to(x_dtype), random(11, 45, seed=2).bfloat16()
    clean = linear(x, Weight(data))
    x[4, 44], data[7, 0], data[8, 44] = float("nan"), float("inf"), float("nan")
    y = linear(x, Weight(data))
    kept = torch.ones(9, 11, dtype=torch.bool)
    kept[4], kept[:, 7:9] = False, False
    assert torch.equal(y[kept], clean[kept])
    assert not y[~kept].isfinite().any()


@pytest.mark.parametrize("rows", (1, 9))
def test_every_fp8_code(isa, x_dtype, rows):
    """All 256 codes of e4m3fn, subnormals and NaN included, come through exactly."""
    codes = torch.arange(256, dtype=torch.uint8).repeat(2)[None, :]
    w = Weight(codes.view(torch.float8_e4m3fn), torch.tensor([[1.0, 2.0, 0.5, 2.0**-10]]))
    for i in range(0, 512, 256):
        x = torch.zeros(256, 512, dtype=x_dtype)
        x[torch.arange(256), torch.arange(i, i + 256)] = 1
        finite = ~w.dequantize().isnan()
        clean = Weight(torch.where(finite, codes, 0).to(torch.uint8).view(torch.float8_e4m3fn), w.scale)
        got = torch.cat([linear(part, clean) for part in x.split(rows)])
        assert torch.equal(got, clean.dequantize()[:, i : i + 256].T.to(x_dtype))
    assert linear(torch.ones(rows, 512, dtype=x_dtype), w).isnan().all()


@pytest.mark.parametrize("rows", (1, 9))
def test_every_int8_code(isa, x_dtype, rows):
    """-128 to 127 come through exactly, also the one code whose magnitude no other has."""
    w = Weight(torch.arange(-128, 128).to(torch.int8).repeat(2)[None, :], torch.ones(1))
    x = torch.eye(512, dtype=x_dtype)
    if quantises_rows(isa, x, w):
        x = x * 127  # as an integer, what it is
    got = torch.cat([linear(part, w) for part in x.split(rows)])
    assert torch.equal(got, (w.dequantize().T * x.max().float()).to(x_dtype))


def test_no_rows_no_columns_no_depth(isa, x_dtype, make_weight):
    assert linear(torch.empty(0, 40, dtype=x_dtype), make_weight(random(5, 40))).shape == (0, 5)
    assert linear(torch.ones(3, 40, dtype=x_dtype), Weight(torch.empty(0, 40))).shape == (3, 0)
    bias = random(5)
    assert torch.equal(linear(torch.empty(2, 0, dtype=x_dtype), Weight(torch.empty(5, 0)), bias)[1], bias.to(x_dtype))


@settings(max_examples=60, deadline=None)
@given(
    m=st.integers(0, 40),
    n=st.integers(1, 90),
    k=st.integers(1, 400),
    kind=st.sampled_from(sorted(WEIGHTS)),
    dtype=st.sampled_from(X_DTYPES),
    level=st.sampled_from(LEVELS),
    seed=st.integers(0, 99),
)
def test_any_shape(m, n, k, kind, dtype, level, seed):
    set_level(level)
    try:
        w, x = WEIGHTS[kind](random(n, k, seed=seed)), random(m, k, seed=seed + 1).to(dtype)
        assert_rounding_apart(linear(x, w), oracle(level, x, w), x.float().abs() @ w.dequantize().abs().T)
    finally:
        set_level(native.detected_isa())


# ---- grouped experts ------------------------------------------------------------------------------------------------

COUNTS = {
    "decode": [1, 0, 3, 2, 0, 1],
    "one expert has all": [0, 0, 90, 0, 0, 0],
    "empty": [0] * 6,
    "prefill": [17, 64, 1, 130, 0, 65],
}


def experts(make_weight, hidden: int, inner: int, num_experts: int = 6) -> tuple[Weight, Weight]:
    w13 = make_weight(random(num_experts, 2 * inner, hidden, seed=11) / hidden**0.5)
    return w13, make_weight(random(num_experts, hidden, inner, seed=12) / inner**0.5)


def expert_magnitude(x, counts, w13, w2) -> torch.Tensor:
    """sum |h| |w2| per output, h the oracle's intermediate; and sum |x| |w13| carried through it."""
    out = torch.zeros(x.shape[0], w2.shape[1])
    start = 0
    for e, count in enumerate(counts):
        rows = x[start : start + count].float()
        gate, up = (rows @ w13.dequantize()[e].T).chunk(2, -1)
        h = torch.nn.functional.silu(gate) * up
        size = (rows.abs() @ w13.dequantize()[e].abs().T).chunk(2, -1)
        h_size = h.abs() + 2**-10 * (size[0] * up.abs() + size[1] * gate.abs())
        out[start : start + count] = h_size @ w2.dequantize()[e].abs().T
        start += count
    return out


def largest_intermediate(x, counts, w13) -> torch.Tensor:
    """[rows, 1], the largest |silu(gate) * up| of each."""
    largest, start = torch.zeros(x.shape[0], 1), 0
    for e, count in enumerate(counts):
        gate, up = (x[start : start + count].float() @ w13.dequantize()[e].T).chunk(2, -1)
        largest[start : start + count] = (torch.nn.functional.silu(gate) * up).abs().amax(-1, keepdim=True)
        start += count
    return largest


@pytest.mark.parametrize("sizes", ((64, 32), (200, 136), (130, 47)), ids=str)
@pytest.mark.parametrize("case", COUNTS)
def test_experts_match_oracle(isa, x_dtype, make_weight, case, sizes):
    w13, w2 = experts(make_weight, *sizes)
    counts = torch.tensor(COUNTS[case], dtype=torch.int32)
    x = random(int(counts.sum()) + 5, sizes[0], seed=13).to(x_dtype)
    used = x[: counts.sum()]
    got = grouped_experts(x, counts, w13, w2)
    assert got.shape == x.shape and got.dtype == x.dtype
    hidden_rounding = 2**-8 if x_dtype == torch.bfloat16 else 0.0
    magnitude = expert_magnitude(used, counts.tolist(), w13, w2)
    if quantises_rows(isa, x, w13):
        # A value of the intermediate that is rounded to bf16 the other way may be quantised to the next integer.
        want = reference.int8_grouped_experts(used, counts, w13, w2).float()
        step = largest_intermediate(used, counts.tolist(), w13) / 127 * w2.dequantize().abs().max()
        magnitude, hidden_rounding = magnitude + step / 2**-9, 2**-8
    else:
        want = reference.grouped_experts(used.float(), counts, w13, w2)
    assert_rounding_apart(got[: len(used)], want, magnitude, hidden_rounding)


@pytest.mark.parametrize("sizes", ((200, 136), (130, 47)), ids=str)
def test_expert_row_is_independent_of_batch(isa, x_dtype, make_weight, sizes):
    w13, w2 = experts(make_weight, *sizes, num_experts=3)
    x = random(80, sizes[0], seed=14).to(x_dtype)
    alone = {
        e: torch.cat([grouped_experts(x[i : i + 1], one_hot(3, e, 1), w13, w2) for i in range(80)]) for e in range(3)
    }
    for counts in ([2, 3, 4], [70, 0, 10], [0, 79, 1], [17, 33, 30], [1, 1, 1]):
        y = grouped_experts(x, torch.tensor(counts, dtype=torch.int32), w13, w2)
        owner = torch.tensor([0] * counts[0] + [1] * counts[1] + [2] * counts[2])
        for row, e in enumerate(owner.tolist()):
            assert torch.equal(y[row], alone[e][row]), f"counts {counts}, row {row}, expert {e}"


def one_hot(size: int, index: int, value: int) -> torch.Tensor:
    return torch.tensor([value if i == index else 0 for i in range(size)], dtype=torch.int32)


def test_experts_agree_with_linear(isa, make_weight):
    """In float32 the fused operator is its parts: linear, silu_mul, linear."""
    w13, w2 = experts(make_weight, 64, 40)
    x = random(12, 64, seed=15)
    at = lambda w, e: Weight(w.data[e], None if w.scale is None else w.scale[e])  # noqa: E731
    want = linear(reference.silu_mul(linear(x, at(w13, 4))), at(w2, 4))
    torch.testing.assert_close(grouped_experts(x, one_hot(6, 4, 12), w13, w2), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("sizes", ((64, 32), (224, 160), (4096, 96)), ids=str)
def test_fp4_experts_are_those_of_their_values(isa, x_dtype, sizes):
    """Bit for bit what bfloat16 weights of the same values give, under any scale and in any order of matrices."""
    hidden, inner = sizes
    w13, w2 = (
        quantize_fp4(random(4, *shape, seed=i)) for i, shape in enumerate(((2 * inner, hidden), (hidden, inner)))
    )
    for w in (w13, w2):
        assert w.scale is not None
        w.scale[0, 0, 0], w.scale[3, 1, 0] = 1, 140
    wide = [Weight(w.dequantize().bfloat16()) for w in (w13, w2)]
    counts, matrices = torch.tensor([0, 67, 1, 12, 0], dtype=torch.int32), torch.tensor([-1, 2, 0, 3, 1])
    x = random(83, hidden, seed=9).to(x_dtype)
    at = {"matrix_E": matrices.int(), "limit": 7.0}
    got, want = grouped_experts(x, counts, w13, w2, **at), grouped_experts(x, counts, wide[0], wide[1], **at)
    assert torch.equal(got[:80], want[:80]) and got[:80].isfinite().all()


def test_many_rows_are_cut_into_batches_of_experts(isa, x_dtype):
    w13, w2 = experts(WEIGHTS["bfloat16"], 48, 32)
    counts = torch.tensor([600, 500, 0, 1500, 3, 20], dtype=torch.int32)
    x = random(int(counts.sum()), 48, seed=16).to(x_dtype)
    y = grouped_experts(x, counts, w13, w2)
    start = 0
    for e, count in enumerate(counts.tolist()):
        rows = x[start : start + count]
        assert torch.equal(y[start : start + count], grouped_experts(rows, one_hot(6, e, count), w13, w2))
        start += count


def test_extreme_gates(isa):
    """SiLU at the ends of the range: exactly 0 for -200, the identity for +200, NaN kept."""
    x = torch.tensor([[-200.0], [200.0], [-80.0], [0.0], [float("nan")], [1e30]])
    w = Weight(torch.ones(1, 2, 1)), Weight(torch.ones(1, 1, 1))
    y = grouped_experts(x, torch.tensor([6], dtype=torch.int32), *w)[:, 0]
    want = torch.nn.functional.silu(x[:, 0]) * x[:, 0]
    torch.testing.assert_close(y, want, rtol=1e-6, atol=1e-30, equal_nan=True)


# ---- bad input ------------------------------------------------------------------------------------------------------


def test_errors_name_the_value():
    x, w = torch.ones(2, 8), Weight(torch.ones(4, 8))
    with pytest.raises(ValueError, match=r"\[rows, 8\].*\(2, 7\)"):
        linear(x[:, :7], w)
    with pytest.raises(ValueError, match="float16"):
        linear(x.half(), w)
    with pytest.raises(ValueError, match=r"\(3,\).*4 rows"):
        linear(x, w, torch.ones(3))
    with pytest.raises(ValueError, match="contiguous"):
        linear(x, Weight(torch.ones(8, 4).T))
    with pytest.raises(ValueError, match="dtype"):
        Weight(torch.ones(4, 8, dtype=torch.float16))
    with pytest.raises(ValueError, match="needs scale"):
        Weight(torch.ones(4, 8, dtype=torch.int8), torch.ones(5))


def test_expert_errors_name_the_value():
    x, counts = torch.ones(4, 8), torch.tensor([1, 2], dtype=torch.int32)
    w13, w2 = Weight(torch.ones(2, 6, 8)), Weight(torch.ones(2, 8, 3))
    with pytest.raises(ValueError, match="int32"):
        grouped_experts(x, counts.long(), w13, w2)
    with pytest.raises(ValueError, match=r"\[E, 2I, H\]"):
        grouped_experts(x, counts, w13, Weight(torch.ones(2, 8, 4)))
    with pytest.raises(ValueError, match="one dtype"):
        grouped_experts(x, counts, w13, Weight(torch.ones(2, 8, 3).bfloat16()))
    with pytest.raises(ValueError, match="sum 9; x_RH has 4 rows"):
        grouped_experts(x, torch.tensor([7, 2], dtype=torch.int32), w13, w2)
    with pytest.raises(ValueError, match="minimum -1"):
        grouped_experts(x, torch.tensor([-1, 2], dtype=torch.int32), w13, w2)


def test_experts_write_where_they_are_told():
    x, w13, w2 = torch.randn(5, 16), Weight(torch.randn(2, 24, 16)), Weight(torch.randn(2, 16, 12))
    counts = torch.tensor([2, 3], dtype=torch.int32)
    out = torch.full((5, 16), float("nan"))
    assert grouped_experts(x, counts, w13, w2, out) is out
    assert torch.equal(out, grouped_experts(x, counts, w13, w2))
    for wrong in (torch.empty(4, 16), torch.empty(5, 16, dtype=torch.bfloat16), torch.empty(16, 5).T):
        with pytest.raises(ValueError, match="out_RH must be contiguous"):
            grouped_experts(x, counts, w13, w2, wrong)
