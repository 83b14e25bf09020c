"""The routed experts one after another (experts_cublas.py) against the slow oracle. In the interpreter a product on
the host stands in for cuBLAS, and one stream for two."""

import ctypes
import math
from contextlib import nullcontext
from unittest import mock

import torch
from torch import Tensor

from eprt.ops import cuda
from eprt.ops.cuda import cublas, experts_cublas
from eprt.ops.cuda.quantize import quantize_rows
from eprt.ops.known_rows import LEAST_ROWS, KnownRows
from eprt.ops.weight import Weight, quantize_fp4, quantize_fp8
from tests import reference_ops as reference
from tests.gpu.draw import Draw, experts_at, near, weight_on

# Rows of each expert: none, one, whole tiles, and ends inside a tile, also where no memory follows.
COUNTS = ((40, 0, 1, 17, 64, 2, 0, 33), (16, 16), (5,), (0, 0, 3, 0), (0, 0))


def at(address: int, dtype: torch.dtype, *shape: int) -> Tensor:
    """The memory there."""
    size = math.prod(shape) * dtype.itemsize
    return torch.frombuffer((ctypes.c_uint8 * size).from_address(address), dtype=torch.uint8).view(dtype).view(shape)


class ProductOnHost:
    """BlockScaledProduct in fp32."""

    def __init__(self, n: int, k: int, device: int | None):
        self.n, self.k = n, k

    def __call__(
        self, rows: int, x: int, x_scale: int, w: int, w_scale: int, out: int, stream: int, num_sms: int | None
    ) -> None:
        assert rows % 4 == 0 and not (x | x_scale | w | out) % 16
        scale_GP = at(x_scale, torch.float32, self.k // 128, rows)
        x_PK = at(x, torch.float8_e4m3fn, rows, self.k).float() * scale_GP.T.repeat_interleave(128, 1)
        blocks = at(w_scale, torch.float32, self.n // 128, self.k // 128)
        w_NK = Weight(at(w, torch.float8_e4m3fn, self.n, self.k), blocks).dequantize()
        at(out, torch.bfloat16, rows, self.n).copy_(x_PK.nan_to_num() @ w_NK.T)


def one_by_one(draw: Draw, *inputs) -> Tensor:
    if draw.device == "cuda":
        return experts_cublas.experts_one_by_one(*inputs)
    stream, no_stream = mock.Mock(cuda_stream=0), lambda stream: nullcontext()
    with (
        mock.patch.object(experts_cublas, "_product", ProductOnHost),
        mock.patch.object(experts_cublas, "_side_stream", lambda device: stream),
        mock.patch.multiple(torch.cuda, current_stream=lambda: stream, stream=no_stream),
    ):
        return experts_cublas.experts_one_by_one(*inputs)


def many_rows(draw: Draw) -> None:
    """In the interpreter narrow, and without the grouped product: it is slow there."""
    on_gpu, num_buffers = draw.device == "cuda", 10
    hidden, width = (512, 512) if on_gpu else (256, 128)
    w13 = draw.normal(num_buffers, 2 * width, hidden, scale=hidden**-0.5).cpu()
    w2 = draw.normal(num_buffers, hidden, width, scale=width**-0.5).cpu()
    formats = ((quantize_fp8, 0.12), (lambda w: Weight(w.bfloat16()), 8e-3), (quantize_fp4, 8e-3))
    for convert, tolerance in formats:
        weights = [convert(w) for w in (w13, w2)]
        on_device = weight_on(draw.device, weights[0]), weight_on(draw.device, weights[1])
        for counts in COUNTS if on_gpu else COUNTS[::2]:
            rows, what = sum(counts), f"{weights[0].data.dtype} experts one by one, rows {counts}"
            buffer = torch.randperm(num_buffers, generator=draw.generator)[: len(counts)].int()
            count, x = torch.tensor(counts).int(), draw.normal(rows, hidden, dtype=torch.bfloat16)
            known, given = KnownRows(counts, buffer.tolist()), (count.to(draw.device), *on_device)
            out = torch.full((rows, hidden), float("nan"), dtype=torch.bfloat16, device=draw.device)
            assert one_by_one(draw, x, *given, out, None, known) is out
            want = reference.grouped_experts(x.cpu(), count, *(experts_at(w, buffer) for w in weights))
            near(out, want, tolerance, what)
            cut = one_by_one(draw, x, *given, torch.empty_like(out), None, known, None, 0.5)
            want = reference.grouped_experts(x.cpu(), count, *(experts_at(w, buffer) for w in weights), 0.5)
            near(cut, want, tolerance, f"{what}, cut")
            if on_gpu:
                grouped = cuda.grouped_experts(x, given[0], *on_device, None, buffer.to(draw.device))
                near(out, grouped, 0.03, f"{what}, beside the grouped product")
            if convert is quantize_fp8:
                data, scale = quantize_rows(x)
                wide = scale.new_full((rows, scale.shape[1] + 3), float("nan"))  # rows of scales lie apart
                wide[:, : scale.shape[1]] = scale
                sent = one_by_one(draw, data, *given, torch.empty_like(out), wide[:, : scale.shape[1]], known)
                near(sent, out, 1e-6, f"{what}, that came as fp8")
                fewer = one_by_one(draw, data, *given, torch.empty_like(out), scale, known, 100)
                near(fewer, out, 8e-3, f"{what}, on 100 SMs")


def chosen(draw: Draw) -> None:
    """By the mean of the experts that have rows; never for fp32 or shapes that cuBLAS does not take."""
    many, few = (KnownRows((0, rows, rows), (0, 1, 2)) for rows in (LEAST_ROWS, 64))
    fp8, odd = (weight_on(draw.device, quantize_fp8(torch.randn(1, 512, k))) for k in (512, 384))
    plain = Weight(fp8.data.bfloat16())
    on_gpu, bf16 = draw.device == "cuda", torch.bfloat16
    fp4 = weight_on(draw.device, quantize_fp4(torch.randn(1, 512, 64)))
    for w in (plain, fp4):
        assert experts_cublas.is_faster(many, w, w, bf16) == on_gpu
    assert experts_cublas.is_faster(many, fp8, fp8, bf16) == (on_gpu and cublas.can_multiply(fp8, bf16))
    never = ((few, plain, bf16), (few, fp4, bf16), (many, plain, torch.float32), (many, fp4, torch.float32))
    for known, w, dtype in (*never, (many, odd, bf16)):
        assert not experts_cublas.is_faster(known, w, w, dtype)


ALL = (many_rows, chosen)
