"""Products of the GPU operators against the slow oracles: dense layers and grouped experts."""

from dataclasses import dataclass

import torch
from torch import Tensor

from eprt.ops import cuda
from eprt.ops.cuda.grouped_gemm import grouped_gemm
from eprt.ops.cuda.linear import _add_parts
from eprt.ops.cuda.quantize import quantize_rows
from eprt.ops.tuning import Tiling
from eprt.ops.weight import Weight, quantize_fp8
from tests import reference_ops as reference
from tests.gpu.draw import DTYPES, ROUNDING, Draw, cpu, experts_at, near, weight_on


def norm_linears(draw: Draw) -> None:
    """What the separate operators give, of rows that lie apart."""
    for rows, n, k in ((3, 96, 384), (1, 130, 1536), (70, 272, 1024), (0, 16, 32)):
        wide, norm, bias = draw.normal(rows, k + 8), draw.normal(k), draw.normal(n)
        plain = draw.normal(n, k, scale=k**-0.5)
        for dtype, weight in (
            (torch.float32, Weight(plain)),
            (torch.bfloat16, Weight(plain.bfloat16())),
            (torch.bfloat16, weight_on(draw.device, quantize_fp8(plain.cpu()))),
        ):
            x, factor = wide.to(dtype)[:, :k], norm.to(dtype)
            want = cuda.linear(cuda.rms_norm(x, factor, 1e-6), weight, bias)
            got = cuda.norm_linear(x, factor, 1e-6, weight, bias)
            near(got, want, 0 if weight.scale is not None else 1e-6, f"norm_linear {dtype} {rows}x{n}x{k}")


def linears(draw: Draw, shapes=((1, 256, 128), (7, 96, 200), (33, 130, 384), (0, 16, 32))) -> None:
    for rows, n, k in shapes:
        weight, bias = draw.normal(n, k, scale=k**-0.5), draw.normal(n)
        for dtype in DTYPES:
            x, plain = draw.normal(rows, k, dtype=dtype), Weight(weight.to(dtype))
            want = reference.linear(x.cpu(), Weight(plain.data.cpu()), bias.cpu())
            near(cuda.linear(x, plain, bias), want, ROUNDING[dtype], f"linear {dtype} {rows}x{n}x{k}")
            exact = cuda.linear(x, Weight(weight.to(torch.bfloat16)), out_dtype=torch.float32)
            want = reference.linear(x.cpu().float(), Weight(weight.cpu().to(torch.bfloat16)))
            assert exact.dtype == torch.float32
            near(exact, want, 4e-6, f"linear to fp32 {dtype} {rows}x{n}x{k}")
        fp8 = quantize_fp8(weight.cpu())
        x, on_device = draw.normal(rows, k), weight_on(draw.device, fp8)
        near(cuda.linear(x, on_device), reference.linear(x.cpu(), fp8), 2e-6, f"fp32 x fp8 {rows}x{n}x{k}")
        x = x.bfloat16()
        want = _fp8_oracle(x, fp8, bias)
        near(cuda.linear(x, on_device, bias), want, ROUNDING[torch.bfloat16], f"fp8 linear {rows}x{n}x{k}")


def silu_linears(draw: Draw) -> None:
    for rows, n, k in ((3, 96, 256), (70, 272, 1024)):
        x, weight = draw.normal(rows, 2 * k), draw.normal(n, k, scale=k**-0.5)
        want = reference.silu_mul(x.cpu()) @ weight.cpu().T
        near(cuda.silu_linear(x, Weight(weight)), want, 4e-6, f"silu_linear fp32 {rows}x{n}x{k}")
        fp8 = quantize_fp8(weight.cpu())
        want = reference.silu_mul(x.bfloat16().cpu().float()) @ fp8.dequantize().T
        got = cuda.silu_linear(x.bfloat16(), weight_on(draw.device, fp8))
        assert got.dtype == torch.bfloat16
        near(got, want, 0.08, f"silu_linear fp8 {rows}x{n}x{k}")


def splits_of_k(draw: Draw) -> None:
    """Parts of K, also more than there are blocks, add up to the whole."""
    x, weight = draw.normal(5, 640), weight_on(draw.device, quantize_fp8(draw.normal(200, 640, scale=0.04).cpu()))
    data, scale = quantize_rows(x)
    for rows, kind in (((x, None), "fp32"), ((data, scale), "fp8")):
        whole = grouped_gemm(rows[0], weight, x_scale_RG=rows[1], dtype=torch.float32)[0]
        tiling = Tiling(16, 64, 128, 4, 2, 2)
        for splits, filled in ((2, 2), (3, 3), (4, 3), (7, 5)):  # of five blocks
            parts = grouped_gemm(rows[0], weight, x_scale_RG=rows[1], tiling=tiling, splits=splits)[0]
            assert parts.shape == (filled, 5, 200) and parts.abs().amax((1, 2)).min() > 0, "no part is empty"
            near(_add_parts(parts, torch.float32), whole, 2e-6, f"{kind} in {splits} parts of K")


def _fp8_oracle(x: Tensor, weight: Weight, bias: Tensor) -> Tensor:
    """Of the rows as they are after quantisation: what is left is the product itself."""
    data, scale = cpu(*quantize_rows(x))
    rows = data.float() * scale.repeat_interleave(128, 1)[:, : x.shape[1]]
    return (rows @ weight.dequantize().T + bias.cpu()).bfloat16()


def experts(draw: Draw, shapes=((4, 128, 192), (3, 96, 64), (33, 256, 128))) -> None:
    for num_experts, hidden, width in shapes:
        count = draw.integers(0, 6, num_experts).int()
        count[num_experts // 2] = 0
        count[0] = 21
        rows, num_buffers = int(count.sum()) + 5, num_experts + 2
        buffer = torch.randperm(num_buffers, generator=draw.generator)[:num_experts].int()
        w13 = draw.normal(num_buffers, 2 * width, hidden, scale=hidden**-0.5).cpu()
        w2 = draw.normal(num_buffers, hidden, width, scale=width**-0.5).cpu()
        for weight_format in ("fp32", "bf16", "fp8"):
            convert = {"fp32": Weight, "bf16": lambda w: Weight(w.bfloat16()), "fp8": quantize_fp8}[weight_format]
            if weight_format == "fp8" and width % 128:
                continue
            one, two = convert(w13), convert(w2)
            placed, on_device = (
                [experts_at(w, buffer) for w in (one, two)],
                [weight_on(draw.device, w) for w in (one, two)],
            )
            x = draw.normal(rows, hidden)
            for dtype, tolerance in ((torch.float32, 3e-6), (torch.bfloat16, 0.12 if weight_format == "fp8" else 8e-3)):
                if weight_format == {torch.float32: "bf16", torch.bfloat16: "fp32"}[dtype]:
                    continue
                out = torch.full((rows, hidden), float("nan"), dtype=dtype, device=draw.device)
                got = cuda.grouped_experts(x.to(dtype), count, *on_device, out, buffer.to(draw.device))
                filled = int(count.sum())
                assert got is out and out[filled:].isnan().all()
                want = reference.grouped_experts(x.to(dtype).cpu(), count.cpu(), *placed)
                what = f"experts {num_experts}x{hidden}x{width} {weight_format} {dtype}"
                near(got[:filled], want[:filled], tolerance, what)
            if weight_format == "fp8":
                data, scale = quantize_rows(x.bfloat16())
                sent = cuda.grouped_experts(data, count, *on_device, None, buffer.to(draw.device), scale)
                near(sent[:filled], got[:filled], 1e-6, f"{what}: rows that came as fp8")
    y, _ = grouped_gemm(x[:0].bfloat16(), Weight(w2[0].bfloat16().to(draw.device).T.contiguous()))
    assert y.shape[0] == 0


@dataclass(frozen=True)
class Counters:
    """A TileSignal."""

    counter: Tensor
    block_m: int
    slot_tiles: int


def signals(draw: Draw) -> None:
    """The second product tells of every tile that has rows, and of no other; its result does not depend on that."""
    count = torch.tensor([21, 0, 16, 1], dtype=torch.int32, device=draw.device)
    for weight, dtype in ((quantize_fp8, torch.bfloat16), (lambda w: Weight(w.bfloat16()), torch.bfloat16)):
        w13 = weight_on(draw.device, weight(draw.normal(4, 256, 160, scale=0.08).cpu()))
        w2 = weight_on(draw.device, weight(draw.normal(4, 160, 128, scale=0.08).cpu()))
        inner = cuda.experts_up(draw.normal(43, 160, dtype=dtype), count, w13, expected_rows=38)
        want = cuda.experts_down(inner, w2)[:38]
        for block_m in (16, 32, 64):
            counter = torch.zeros(4 * 3, dtype=torch.int32, device=draw.device)
            got = cuda.experts_down(inner, w2, signal=Counters(counter, block_m, 3), num_sms=2)[:38]
            near(got, want, 1e-6, f"signals, tiles of {block_m}")
            ready = (count[:, None] > torch.arange(3, device=draw.device) * block_m) * 160
            assert torch.equal(counter.view(4, 3), ready.int()), (block_m, counter)
        for bad in (Counters(counter, 24, 3), Counters(counter[:11], 16, 3)):
            try:
                cuda.experts_down(inner, w2, signal=bad)
            except ValueError as error:
                assert "counters; must be" in str(error)
            else:
                raise AssertionError(f"{bad} was taken")


def large_linears(draw: Draw) -> None:
    """Where cuBLAS multiplies fp8, and where K is split."""
    linears(draw, shapes=((130, 272, 1024), (40, 2112, 7168), (3, 2112, 7168)))


SMALL = (norm_linears, linears, silu_linears, splits_of_k, signals)
ALL = (*SMALL, experts, large_linears)
