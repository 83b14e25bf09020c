"""int8 rows and weights on GPUs: sums of integers bit for bit, the rest against the slow oracles."""

import torch
from torch import Tensor

from eprt import ops
from eprt.ops import cuda
from eprt.ops.cuda.grouped_gemm import grouped_gemm
from eprt.ops.cuda.quantize import quantize_rows
from eprt.ops.cuda.quantize_int8 import quantize_rows_int8, rms_norm_quantize_int8, silu_mul_quantize_int8
from eprt.ops.tuning import Tiling
from eprt.ops.weight import Weight, quantize_int8
from tests import reference_ops as reference
from tests.gpu.cases_products import Counters
from tests.gpu.draw import DTYPES, ROUNDING, Draw, cpu, experts_at, near, weight_on


def _same_rows(got: tuple[Tensor, Tensor], x: Tensor, what: str) -> None:
    """Bit for bit the rows that torch makes of x on the CPU."""
    data, scale = cpu(*got)
    want_data, want_scale = reference.int8_rows(x.cpu())
    assert torch.equal(scale, want_scale), what
    assert torch.equal(data, want_data), (what, (data != want_data).sum())


def rows(draw: Draw) -> None:
    """Of any length and distance; halves are rounded to even; zeros; rows past the counts stay as they were."""
    for num, size in ((1, 1), (5, 48), (3, 200), (0, 32), (2, 7168)):
        for dtype in DTYPES:
            x = draw.normal(num, size + 8, dtype=dtype)[:, :size]
            x[num // 2 :] *= 1e-6
            _same_rows(quantize_rows_int8(x), x, f"{dtype} {num}x{size}")
    halves = torch.tensor([[127, 0.5, 1.5, -2.5, -0.5, 126.5, 0, 0], [0] * 8], device=draw.device)
    _same_rows(quantize_rows_int8(halves), halves, "halves and zeros")
    assert quantize_rows_int8(halves)[0].tolist() == [[127, 0, 2, -2, 0, 126, 0, 0], [0] * 8]
    lost = draw.normal(3, 200)
    lost[1, 77] = float("nan")
    data, scale = quantize_rows_int8(lost)
    assert scale.isnan().flatten().tolist() == [False, True, False]
    x, count = draw.normal(6, 160, dtype=torch.bfloat16), torch.tensor([2, 0, 1], dtype=torch.int32)
    x[3:] = float("nan")
    data, scale = quantize_rows_int8(x, None, count.to(draw.device))
    _same_rows((data[:3], scale[:3]), x[:3], "rows of experts")
    data, scale = quantize_rows(x[:3])
    wide = (data.float() * scale.repeat_interleave(128, 1)[:, :160]).bfloat16()
    _same_rows(quantize_rows_int8(data, scale), wide, "rows that came as e4m3")


def weights(draw: Draw) -> None:
    """A matrix becomes the same int8 and the same scales wherever it is quantised."""
    for shape in ((3, 96, 200), (130, 1024)):
        w = draw.normal(*shape, dtype=torch.bfloat16)
        got, want = quantize_int8(w), quantize_int8(w.cpu())
        assert want.scale is not None and got.scale is not None
        assert torch.equal(got.scale.cpu(), want.scale) and torch.equal(got.data.cpu(), want.data)


def fused_rows(draw: Draw) -> None:
    """What the separate operators give: with SiLU bit for bit, with a norm but for the order of its sum."""
    for num, size in ((3, 96), (2, 1536), (0, 32)):
        for dtype in DTYPES:
            x, norm = draw.normal(num, 2 * size, dtype=dtype), draw.normal(size, dtype=dtype)
            got, want = silu_mul_quantize_int8(x), quantize_rows_int8(cuda.silu_mul(x))
            assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1]), (dtype, num, size)
            normed = cuda.rms_norm(x[:, :size], norm, 1e-6)
            (data, scale), want = rms_norm_quantize_int8(x[:, :size], norm, 1e-6), quantize_rows_int8(normed)
            assert (data.int() - want[0].int()).abs().max() <= 1 if num else len(data) == 0
            near(scale, want[1], 4e-3, f"scales of norms, {dtype} {num}x{size}")


def integer_sums(draw: Draw) -> None:
    """With scales of 1 the result is the sum of integers itself: the CPU kernel's, and that of int64, bit for bit."""
    for num, n, k in ((1, 64, 128), (9, 130, 200), (130, 72, 1024)):
        x, w = (draw.integers(-127, 128, rows, k).to(torch.int8) for rows in (num, n))
        x[0], w[0] = 127, -127  # the largest sum; below 2^24, so exact in the CPU kernel's fp32
        ones = [torch.ones(rows, device=draw.device) for rows in (num, n)]
        want = (x.cpu().double() @ w.cpu().double().T).float()
        assert torch.equal(ops.linear(x.cpu().float(), Weight(w.cpu(), ones[1].cpu())), want)
        for tiling in (None, Tiling(16, 64, 128, 4, 3, 2), Tiling(64, 128, 64, 4, 2, 2)):
            given = {"x_scale_RG": ones[0][:, None], "dtype": torch.float32, "tiling": tiling}
            got = grouped_gemm(x, Weight(w, ones[1]), **given)[0]
            assert torch.equal(got.cpu(), want), f"{num}x{n}x{k} {tiling}"
    parts = grouped_gemm(x, Weight(w, ones[1]), splits=3, **given)[0]
    assert len(parts) == 3 and torch.equal(parts.sum(0).cpu(), want), "in three parts of K"


def linears(draw: Draw, shapes=((7, 96, 200), (33, 130, 384), (0, 16, 32))) -> None:
    """float32 rows as on the CPU; bfloat16 rows in int8, alone, behind a norm and behind SiLU."""
    for num, n, k in shapes:
        weight, bias = quantize_int8(draw.normal(n, k, scale=k**-0.5).cpu()), draw.normal(n)
        on_device, x, what = weight_on(draw.device, weight), draw.normal(num, k), f"int8 {num}x{n}x{k}"
        want = reference.linear(x.cpu(), weight, bias.cpu())
        near(cuda.linear(x, on_device, bias), want, 4e-6, f"float32 rows, {what}")
        x = x.bfloat16()
        want = reference.int8_linear(x.cpu(), weight, bias.cpu())
        got = cuda.linear(x, on_device, bias, out_dtype=torch.float32)
        near(got, want, 1e-6, f"{what} to float32")
        got = cuda.linear(x, on_device, bias)
        assert got.dtype == torch.bfloat16
        near(got, want, ROUNDING[torch.bfloat16], what)
        near(got, reference.linear(x.cpu(), weight, bias.cpu()), 0.02, f"{what}, beside the CPU's")
        norm = draw.normal(k, dtype=torch.bfloat16)
        want = cuda.linear(cuda.rms_norm(x, norm, 1e-6), on_device, bias)
        near(cuda.norm_linear(x, norm, 1e-6, on_device, bias), want, 5e-3, f"norm, {what}")
        x = draw.normal(num, 2 * k, dtype=torch.bfloat16)
        near(cuda.silu_linear(x, on_device), cuda.linear(cuda.silu_mul(x), on_device), 0, f"silu, {what}")


def experts(draw: Draw, shapes=((3, 96, 64),)) -> None:
    """Some without rows, some with many, their matrices in any order among others; rows of every kind."""
    for num_experts, hidden, width in shapes:
        count = draw.integers(0, 6, num_experts).int()
        count[num_experts // 2] = 0
        count[0] = 21
        filled, num_buffers = int(count.sum()), num_experts + 2
        buffer = torch.randperm(num_buffers, generator=draw.generator)[:num_experts].int()
        w13 = quantize_int8(draw.normal(num_buffers, 2 * width, hidden, scale=hidden**-0.5).cpu())
        w2 = quantize_int8(draw.normal(num_buffers, hidden, width, scale=width**-0.5).cpu())
        placed = [experts_at(w, buffer) for w in (w13, w2)]
        on_device, matrix = [weight_on(draw.device, w) for w in (w13, w2)], buffer.to(draw.device)
        x = draw.normal(filled + 5, hidden)
        x[filled:] = float("nan")
        what = f"int8 experts {num_experts}x{hidden}x{width}"
        got = cuda.grouped_experts(x, count, *on_device, None, matrix)[:filled]
        want = reference.grouped_experts(x[:filled].cpu(), count.cpu(), *placed)
        near(got, want, 6e-6, f"{what}, float32 rows")
        x = x.bfloat16()
        out = torch.full_like(x, float("nan"))
        assert cuda.grouped_experts(x, count, *on_device, out, matrix) is out and out[filled:].isnan().all()
        near(out[:filled], reference.int8_grouped_experts(x[:filled].cpu(), count.cpu(), *placed), 6e-3, what)
        on_cpu = ops.grouped_experts(x.cpu(), count.cpu(), w13, w2, None, buffer)
        near(out[:filled], on_cpu[:filled], 0.03, f"{what}, beside the CPU's")
        data, scale = quantize_rows(x)
        came = (data.float() * scale.repeat_interleave(128, 1)[:, :hidden]).bfloat16()
        want = cuda.grouped_experts(came, count, *on_device, None, matrix)[:filled]
        got = cuda.grouped_experts(data, count, *on_device, None, matrix, scale)[:filled]
        near(got, want, 0, f"{what}: rows that came as fp8")
        many = cuda.experts_up(x, count, on_device[0], matrix, expected_rows=65 * num_experts)
        near(cuda.experts_down(many, on_device[1])[:filled], out[:filled], 8e-3, f"{what}, as if they were many")
        halves = cuda.experts_up(x, count, on_device[0], matrix, expected_rows=filled)
        near(cuda.experts_down(halves, on_device[1], num_sms=2)[:filled], out[:filled], 1e-6, f"{what}, in two calls")


def signals(draw: Draw) -> None:
    """The second product tells of every tile that has rows, and of no other."""
    count = torch.tensor([21, 0, 16, 1], dtype=torch.int32, device=draw.device)
    w13, w2 = (
        weight_on(draw.device, quantize_int8(draw.normal(4, *shape, scale=0.08).cpu()))
        for shape in ((256, 160), (160, 128))
    )
    inner = cuda.experts_up(draw.normal(43, 160, dtype=torch.bfloat16), count, w13, expected_rows=38)
    want = cuda.experts_down(inner, w2)[:38]
    counter = torch.zeros(4 * 3, dtype=torch.int32, device=draw.device)
    near(cuda.experts_down(inner, w2, signal=Counters(counter, 16, 3), num_sms=2)[:38], want, 0, "signals")
    ready = (count[:, None] > torch.arange(3, device=draw.device) * 16) * 160
    assert torch.equal(counter.view(4, 3), ready.int()), counter


def refusals(draw: Draw) -> None:
    """Rows of one format with weights of another; e4m3 without scales, others with them."""
    weight = weight_on(draw.device, quantize_int8(torch.randn(32, 64)))
    bf16, e4m3 = draw.normal(2, 64, dtype=torch.bfloat16), draw.normal(2, 64).to(torch.float8_e4m3fn)
    for call, want in (
        (lambda: grouped_gemm(bf16, weight), "no product of torch.bfloat16 rows and torch.int8 weights on GPUs"),
        (lambda: grouped_gemm(e4m3, weight), "no product of torch.float8_e4m3fn rows and torch.int8 weights on GPUs"),
        (lambda: cuda.linear(e4m3, weight), "rows of torch.float8_e4m3fn without scales: only e4m3 has them"),
        (lambda: quantize_rows_int8(bf16, bf16), "rows of torch.bfloat16 with scales: only e4m3 has them"),
    ):
        try:
            call()
        except ValueError as error:
            assert str(error) == want
        else:
            raise AssertionError(f"not refused: {want}")


def large(draw: Draw) -> None:
    """Where K is split, where it is not, and many experts."""
    linears(draw, shapes=((1, 256, 128), (200, 48, 1600), (3, 2112, 7168), (300, 2112, 7168)))
    experts(draw, shapes=((4, 128, 192), (33, 256, 128), (2, 7168, 2048)))


SMALL = (rows, weights, fused_rows, integer_sums, linears, experts, signals, refusals)
ALL = (*SMALL, large)
