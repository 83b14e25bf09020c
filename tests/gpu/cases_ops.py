"""The GPU operators against the slow oracles: cases for a device. With TRITON_INTERPRET=1 the device may be the CPU."""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from eprt.ops import cuda, reference
from eprt.ops.attention import PagedContext
from eprt.ops.cuda import attention as cuda_attention
from eprt.ops.cuda.grouped_gemm import grouped_gemm
from eprt.ops.cuda.linear import _add_parts
from eprt.ops.cuda.mla_expanded import attend_prompts
from eprt.ops.cuda.mla_triton import attend
from eprt.ops.cuda.quantize import quantize_rows
from eprt.ops.cuda.silu import silu_mul_quantize
from eprt.ops.elementwise import Rotation
from eprt.ops.gate import GateRule
from eprt.ops.kv_format import KVFormat
from eprt.ops.rows import add_rows, sum_rows
from eprt.ops.tuning import Tiling
from eprt.ops.weight import Weight, quantize_fp8

DTYPES = (torch.float32, torch.bfloat16)


class Draw:
    """Seeded random tensors on the device under test, and the comparison."""

    def __init__(self, device: str, seed: int = 0):
        self.device, self.generator = device, torch.Generator().manual_seed(seed)

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=self.generator) * scale).to(dtype).to(self.device)

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=self.generator).to(self.device)

    def rotation(self, size: int, tokens: int, interleaved: bool) -> Rotation:
        return Rotation(self.normal(50, size), self.integers(0, 50, tokens), interleaved)


def near(got: Tensor, want: Tensor, tolerance: float, what: str) -> None:
    """Relative to the length of the whole; NaN never passes."""
    got, want = got.detach().cpu().double(), want.detach().cpu().double()
    assert got.shape == want.shape, (what, got.shape, want.shape)
    error = ((got - want).norm() / want.norm().clamp_min(1e-30)).item() if want.numel() else 0.0
    assert error <= tolerance, f"{what}: relative error {error:.2e} above {tolerance:.0e}"


def cpu(*tensors: Tensor) -> list[Tensor]:
    return [tensor.cpu() for tensor in tensors]


# The interpreter cuts bfloat16 and e4m3 off where GPUs round.
ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 6e-3}


def norms(draw: Draw) -> None:
    for dtype in DTYPES:
        for rows, size in ((1, 7168), (5, 96), (3, 1536)):
            wide = draw.normal(rows, size + 8, dtype=dtype)
            x, other, weight = wide[:, :size], draw.normal(rows, size, dtype=dtype), draw.normal(size, dtype=dtype)
            want = reference.rms_norm(*cpu(x, weight), 1e-6)
            near(cuda.rms_norm(x, weight, 1e-6), want, ROUNDING[dtype], f"rms_norm {dtype} {rows}x{size}")
            for got, want in zip(
                cuda.add_rms_norm(x, other, weight, 1e-6), reference.add_rms_norm(*cpu(x, other, weight), 1e-6)
            ):
                near(got, want, ROUNDING[dtype], f"add_rms_norm {dtype} {rows}x{size}")


def norm_linears(draw: Draw) -> None:
    """What the separate operators give, of rows that lie apart."""
    for rows, n, k in ((3, 96, 384), (1, 130, 1536), (70, 272, 1024), (0, 16, 32)):
        wide, norm, bias = draw.normal(rows, k + 8), draw.normal(k), draw.normal(n)
        plain = draw.normal(n, k, scale=k**-0.5)
        for dtype, weight in (
            (torch.float32, Weight(plain)),
            (torch.bfloat16, Weight(plain.bfloat16())),
            (torch.bfloat16, _on(draw.device, quantize_fp8(plain.cpu()))),
        ):
            x, factor = wide.to(dtype)[:, :k], norm.to(dtype)
            want = cuda.linear(cuda.rms_norm(x, factor, 1e-6), weight, bias)
            got = cuda.norm_linear(x, factor, 1e-6, weight, bias)
            near(got, want, 0 if weight.scale is not None else 1e-6, f"norm_linear {dtype} {rows}x{n}x{k}")


def silu(draw: Draw) -> None:
    for dtype in DTYPES:
        for rows, size in ((3, 96), (2, 2048), (0, 64)):
            x = draw.normal(rows, 2 * size, dtype=dtype)
            near(cuda.silu_mul(x), reference.silu_mul(x.cpu()), ROUNDING[dtype], f"silu_mul {dtype} {rows}x{size}")
            for padded_to in (1, 16):
                data, scale = silu_mul_quantize(x, padded_to)
                back = (data.float() * scale.repeat_interleave(128, 1)[:, :size])[:rows]
                near(back, reference.silu_mul(x.cpu().float()), 0.08, f"silu_mul_quantize {dtype} {rows}x{size}")


def ropes(draw: Draw) -> None:
    for dtype in DTYPES:
        for tokens, heads, size in ((3, 128, 64), (4, 1, 8), (2, 5, 32)):
            x = draw.normal(tokens, heads, size + 16, dtype=dtype)[..., 16:]
            for interleaved in (True, False):
                rotation = draw.rotation(size, tokens, interleaved)
                want, what = reference.rope(x.cpu(), _rotation_on_cpu(rotation)), f"rope {interleaved} {dtype}"
                near(cuda.rope(x, rotation), want, ROUNDING[dtype], f"{what} {heads}x{size}")


def _rotation_on_cpu(rotation: Rotation) -> Rotation:
    return Rotation(*cpu(rotation.cos_sin_PR, rotation.position_T), rotation.interleaved)


def cache(draw: Draw) -> None:
    for dtype in DTYPES:
        pages, entries = draw.normal(6, 4, 40, dtype=dtype), draw.normal(5, 40, dtype=dtype)
        slots = torch.tensor([23, 0, 7, 8, 22]).to(draw.device)
        want = pages.cpu().clone()
        reference.cache_insert(want, slots.cpu(), entries.cpu())
        cuda.cache_insert(pages, slots, entries)
        assert torch.equal(pages.cpu(), want)
    entry = KVFormat(40, 8, torch.uint8)
    pages, entries = torch.zeros(6, 4, entry.width, dtype=torch.uint8, device=draw.device), draw.normal(5, 48)
    entries[2, :40] = 0
    want = pages.cpu()
    reference.cache_insert(want, slots.cpu(), entries.cpu(), 8)
    cuda.cache_insert(pages, slots, entries, 8)
    got, want = entry.decode(pages.cpu()), entry.decode(want)
    # The interpreter cuts off where GPUs round: half a step of e4m3 apart.
    near(got[..., :40], want[..., :40], 0.05, "fp8 latents")
    near(got[..., 40:], want[..., 40:], ROUNDING[torch.bfloat16], "rotated keys beside fp8 latents")


def latents(draw: Draw) -> None:
    """Norm, rotation and insertion in one kernel: the separate operators, one after the other."""
    for dtype, fp8 in ((torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)):
        for latent, rope, interleaved in ((40, 8, True), (512, 64, True), (512, 64, False)):
            entry = KVFormat(latent, rope, torch.uint8 if fp8 else dtype)
            pages = torch.zeros(6, 4, entry.width, dtype=entry.dtype, device=draw.device)
            kv = draw.normal(5, latent + rope + 8, dtype=dtype)[:, 8:]
            weight, rotation = draw.normal(latent, dtype=dtype), draw.rotation(rope, 5, interleaved)
            slots = torch.tensor([23, 0, 7, 8, 22]).to(draw.device)
            norm = reference.rms_norm(*cpu(kv[:, :latent], weight), 1e-6)
            key = reference.rope(kv[:, None, latent:].cpu(), _rotation_on_cpu(rotation))[:, 0]
            want = pages.cpu()
            reference.cache_insert(want, slots.cpu(), torch.cat((norm, key), dim=-1), rope)
            cuda.latent_insert(pages, slots, kv, weight, 1e-6, rotation)
            got, want = entry.decode(pages.cpu()), entry.decode(want)
            tolerance = 0.05 if fp8 else ROUNDING[dtype]
            near(got[..., :latent], want[..., :latent], tolerance, f"latents {dtype} {'fp8' if fp8 else ''}")
            near(got[..., latent:], want[..., latent:], ROUNDING[dtype], f"rotated keys {dtype}")


def gates(draw: Draw) -> None:
    # scoring, experts, top_k, groups, kept, normalise, bias
    for case in (
        ("sigmoid", 256, 8, 8, 4, True, True),
        ("sigmoid", 32, 4, 4, 2, True, True),
        ("sigmoid", 6, 1, 6, 2, False, False),
        ("softmax", 160, 6, 8, 3, False, False),
        ("softmax", 64, 6, 1, 1, True, False),
        ("softmax_topk", 7, 7, 1, 1, True, False),
    ):
        scoring, experts, top_k, groups, kept, normalise, has_bias = case
        logits = draw.normal(9, experts)
        logits[1] = 0.0  # ties
        logits[2, ::2] = 3.0
        bias = draw.normal(experts, scale=0.1) if has_bias else None
        rule = GateRule(scoring, top_k, groups, kept, normalise, 2.5)
        weights, chosen = cuda.gate_topk(logits, bias, rule)
        want_weights, want = reference.gate_topk(logits.cpu(), None if bias is None else bias.cpu(), rule)
        assert torch.equal(chosen.cpu(), want), case
        near(weights, want_weights, 1e-6, f"gate {case}")
        token = torch.where(torch.arange(9).to(draw.device) % 4 == 1, -1, draw.integers(0, 9, 9))
        _, chosen = cuda.gate_topk(logits, bias, rule, token)
        assert torch.equal(chosen.cpu(), want.masked_fill(token.cpu().view(-1, 1) < 0, -1)), case
        logits[3], logits[4, 1], logits[5, : experts - 1] = math.nan, math.nan, math.nan
        _, chosen = cuda.gate_topk(logits, bias, rule)
        for row in chosen.tolist():
            assert len(set(row)) == top_k and 0 <= min(row) <= max(row) < experts, (case, row)
        assert torch.equal(chosen[[0, 1, 2, 6, 7, 8]].cpu(), want[[0, 1, 2, 6, 7, 8]]), case


def quantising(draw: Draw) -> None:
    for rows, size in ((3, 384), (2, 96), (1, 7168), (5, 200)):
        x = draw.normal(rows, size, dtype=torch.bfloat16) * torch.logspace(-3, 3, size).to(draw.device)
        data, scale = quantize_rows(x)
        assert scale.shape == (rows, -(-size // 128))
        back = data.float() * scale.repeat_interleave(128, 1)[:, :size]
        near(back, x, 0.08, f"quantize_rows {rows}x{size}")
        assert (back - x).abs().max() <= x.abs().max() / 7
    data, scale = quantize_rows(torch.zeros(2, 128, device=draw.device))
    assert not data.float().any() and scale.isfinite().all()


def rows_back(draw: Draw) -> None:
    for dtype in DTYPES:
        for tokens, top_k, size in ((5, 4, 96), (1, 8, 2050), (0, 2, 16)):
            y, weight = draw.normal(tokens * top_k + 1, size, dtype=dtype), draw.normal(tokens, top_k)
            row = torch.randperm(tokens * top_k, generator=draw.generator).view(tokens, top_k).to(draw.device)
            row[:, 1:][draw.integers(0, 3, tokens, top_k - 1) == 0] = -1
            y[-1] = float("nan")  # where -1 would lead
            near(cuda.sum_rows(y, row, weight), sum_rows(*cpu(y, row, weight)), ROUNDING[dtype], f"sum_rows {dtype}")
        x, y, z = (draw.normal(3, 700, dtype=dtype) for _ in range(3))
        for more in (z, None):
            want = add_rows(*cpu(x, y), None if more is None else more.cpu())
            near(cuda.add_rows(x, y, more), want, ROUNDING[dtype], f"add_rows {dtype}")


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
        x, on_device = draw.normal(rows, k), _on(draw.device, fp8)
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
        got = cuda.silu_linear(x.bfloat16(), _on(draw.device, fp8))
        assert got.dtype == torch.bfloat16
        near(got, want, 0.08, f"silu_linear fp8 {rows}x{n}x{k}")


def splits_of_k(draw: Draw) -> None:
    """Parts of K, also more than there are blocks, add up to the whole."""
    x, weight = draw.normal(5, 640), _on(draw.device, quantize_fp8(draw.normal(200, 640, scale=0.04).cpu()))
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
        rows, storages = int(count.sum()) + 5, num_experts + 2
        storage = torch.randperm(storages, generator=draw.generator)[:num_experts].int()
        w13 = draw.normal(storages, 2 * width, hidden, scale=hidden**-0.5).cpu()
        w2 = draw.normal(storages, hidden, width, scale=width**-0.5).cpu()
        for weight_format in ("fp32", "bf16", "fp8"):
            convert = {"fp32": Weight, "bf16": lambda w: Weight(w.bfloat16()), "fp8": quantize_fp8}[weight_format]
            if weight_format == "fp8" and width % 128:
                continue
            one, two = convert(w13), convert(w2)
            placed, on_device = [_at(w, storage) for w in (one, two)], [_on(draw.device, w) for w in (one, two)]
            x = draw.normal(rows, hidden)
            for dtype, tolerance in ((torch.float32, 3e-6), (torch.bfloat16, 0.12 if weight_format == "fp8" else 8e-3)):
                if weight_format == {torch.float32: "bf16", torch.bfloat16: "fp32"}[dtype]:
                    continue
                out = torch.full((rows, hidden), float("nan"), dtype=dtype, device=draw.device)
                got = cuda.grouped_experts(x.to(dtype), count, *on_device, out, storage.to(draw.device))
                filled = int(count.sum())
                assert got is out and out[filled:].isnan().all()
                want = reference.grouped_experts(x.to(dtype).cpu(), count.cpu(), *placed)
                what = f"experts {num_experts}x{hidden}x{width} {weight_format} {dtype}"
                near(got[:filled], want[:filled], tolerance, what)
            if weight_format == "fp8":
                data, scale = quantize_rows(x.bfloat16())
                sent = cuda.grouped_experts(data, count, *on_device, None, storage.to(draw.device), scale)
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
        w13 = _on(draw.device, weight(draw.normal(4, 256, 160, scale=0.08).cpu()))
        w2 = _on(draw.device, weight(draw.normal(4, 160, 128, scale=0.08).cpu()))
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


def _at(w: Weight, storage: Tensor) -> Weight:
    """The experts' own matrices, in order. (torch does not index e4m3.)"""
    data = w.data.view(torch.uint8)[storage.long()].view(w.data.dtype)
    return Weight(data, None if w.scale is None else w.scale[storage.long()])


def _on(device: str, w: Weight) -> Weight:
    return Weight(w.data.to(device), None if w.scale is None else w.scale.to(device))


def attention(draw: Draw, heads_and_sizes=((4, 32, 8, 16, 16), (16, 64, 16, 32, 32), (3, 48, 8, 24, 20))) -> None:
    for heads, latent, rope, nope, value in heads_and_sizes:
        for dtype, fp8 in ((torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)):
            lengths, new = [1, 9, 23, 17, 5], [1, 4, 23, 0, 2]
            pages = draw.normal(40, 4, latent + rope, dtype=dtype)
            if fp8:
                entry = KVFormat(latent, rope, torch.uint8)
                pages = entry.encode(pages.view(160, -1)).view(40, 4, entry.width)
            pages_of = [torch.randperm(40, generator=draw.generator)[:10] for _ in lengths]
            table = torch.stack(pages_of).int().to(draw.device)
            length = torch.tensor(lengths).int().to(draw.device)
            w = draw.normal(heads * (nope + value), latent, dtype=dtype, scale=latent**-0.5)
            start = torch.tensor([0, *torch.tensor(new).cumsum(0).tolist()]).int().to(draw.device)
            tolerance = {torch.float32: 3e-6, torch.bfloat16: 2e-2}[dtype]
            for name, tokens, first_rows in (("mla_decode", 5, None), ("mla_extend", sum(new), start)):
                q = draw.normal(tokens, heads, nope + rope, dtype=dtype)
                context = PagedContext(pages, table, length, first_rows)
                inputs, on_cpu = (q[..., :nope], q[..., nope:], context, w, 0.2), _context_on_cpu(context)
                want = getattr(reference, name)(*cpu(q[..., :nope], q[..., nope:]), on_cpu, w.cpu(), 0.2)
                what = f"{name} {heads} heads {dtype}{' fp8 cache' if fp8 else ''}"
                near(getattr(cuda, name)(*inputs), want, tolerance, what)
                if name == "mla_decode":
                    rotation = draw.rotation(rope, tokens, heads > 3)
                    turned = reference.rope(q[..., nope:].cpu(), _rotation_on_cpu(rotation))
                    want_turned = reference.mla_decode(q[..., :nope].cpu(), turned, on_cpu, w.cpu(), 0.2)
                    near(cuda.mla_decode(*inputs, rotation, {}), want_turned, tolerance, f"{what}, rotated")
            if dtype == torch.bfloat16:  # heads one by one, or at once; a context of known size, or not
                num_tokens, room = (sum(lengths), 1) if fp8 else (None, 1 << 20)
                inputs = *inputs[:2], replace(context, num_tokens=num_tokens), w, 0.2
                got = attend_prompts(*inputs, workspace_bytes=room, tile=16, keys=16)
                near(got, want, tolerance, f"{what}, expanded")
        splits(draw, heads, latent, rope, table, length)


def _context_on_cpu(context: PagedContext) -> PagedContext:
    return PagedContext(*(part if part is None else part.cpu() for part in vars(context).values()))


def splits(draw: Draw, heads: int, latent: int, rope: int, table: Tensor, length: Tensor) -> None:
    """Any number of splits, also more than there are tokens, gives the same."""
    pages = draw.normal(40, 4, latent + rope, dtype=torch.bfloat16)
    q, r = draw.normal(5, heads, latent, dtype=pages.dtype), draw.normal(5, heads, rope, dtype=pages.dtype)
    context = PagedContext(pages, table, length)
    whole = attend(q, r, context, 0.2, num_splits=1)
    for count in (2, 3, 7):
        near(attend(q, r, context, 0.2, num_splits=count), whole, 5e-3, f"{count} splits")


def libraries(draw: Draw) -> None:
    """Every attention kernel that is installed, at DeepSeek's sizes, also recorded in a graph whose lengths change."""
    for name in cuda_attention.installed():
        length = torch.tensor([1, 64, 1000, 129]).int().to(draw.device)
        pages = draw.normal(40, 64, 576, dtype=torch.bfloat16)
        table = torch.stack([torch.randperm(40, generator=draw.generator)[:16] for _ in range(4)]).int().to(draw.device)
        q, w = draw.normal(4, 128, 192, dtype=torch.bfloat16), draw.normal(128 * 256, 512, scale=0.04).bfloat16()
        latent = torch.einsum("tnc,ncl->tnl", q[..., :128], w.view(128, 256, 512)[:, :128])
        kernel = cuda_attention.kernels(name)[0]
        context = PagedContext(pages, table, length)
        inputs = latent, q[..., 128:], context, 0.08
        if kernel.refusal(latent, q[..., 128:], context) is not None:
            continue
        kernel.attend(*inputs)
        graph, plans = torch.cuda.CUDAGraph(), {}
        with torch.cuda.graph(graph):
            kernel.attend(*inputs, plans=plans)
            recorded = kernel.attend(*inputs, plans=plans)  # by the first one's plan
        for lengths in ([1, 64, 1000, 129], [1024, 1, 1, 513]):
            length.copy_(torch.tensor(lengths))
            graph.replay()
            value = torch.einsum("tnl,nvl->tnv", recorded, w.view(128, 256, 512)[:, 128:])
            on_cpu = _context_on_cpu(context)
            want = reference.mla_decode(*cpu(q[..., :128], q[..., 128:]), on_cpu, w.cpu(), 0.08)
            near(value, want, 2e-2, f"{name}, lengths {lengths}")


def large_linears(draw: Draw) -> None:
    """Where cuBLAS multiplies fp8, and where K is split."""
    linears(draw, shapes=((130, 272, 1024), (40, 2112, 7168), (3, 2112, 7168)))


SMALL = (
    norms,
    norm_linears,
    silu,
    ropes,
    cache,
    latents,
    gates,
    quantising,
    rows_back,
    linears,
    silu_linears,
    splits_of_k,
    signals,
)
ALL = (*SMALL, experts, attention, libraries, large_linears)
