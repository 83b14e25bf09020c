"""Gates, cut activations and fp4 experts of DeepSeek V4 on a device, against the slow oracles."""

from collections.abc import Callable

import torch
from torch import Tensor

from eprt import ops
from eprt.ops import cuda
from eprt.ops.cuda.fp4_matrix import fp4_matrix
from eprt.ops.cuda.grouped_gemm import grouped_gemm
from eprt.ops.cuda.planes import to_planes
from eprt.ops.cuda.quantize import quantize_rows
from eprt.ops.cuda.quantize_int8 import quantize_rows_int8, silu_mul_quantize_int8
from eprt.ops.cuda.silu import silu_mul_quantize
from eprt.ops.gate import GateRule
from eprt.ops.tuning import Tiling
from eprt.ops.weight import Weight, quantize_fp4, quantize_fp8, quantize_int8
from tests import reference_ops as reference
from tests.gpu.cases_products import Counters
from tests.gpu.draw import DTYPES, ROUNDING, Draw, experts_at, near, weight_on

LIMIT = 0.7
# V4-Flash's and V4-Pro's gates, one with groups, and one that takes every expert.
GATES = (
    GateRule("sqrtsoftplus", 6, 1, 1, True, 1.5),
    GateRule("sqrtsoftplus", 4, 4, 2, True, 2.5),
    GateRule("sqrtsoftplus", 8, 1, 1, False, 1.0),
)


def gates(draw: Draw) -> None:
    """Scores from very small to large, ties, biases that turn the order around, padding."""
    for rule, experts in zip(GATES, (256, 32, 8)):
        logits = draw.normal(40, experts, scale=8)
        logits[1], logits[2, ::2], logits[3] = 0.0, 3.0, -60 + 0.1 * logits[3]
        bias = draw.normal(experts)
        for given_bias in (bias, None) if experts == 8 else (bias,):
            weights, chosen = cuda.gate_topk(logits, given_bias, rule)
            on_cpu = None if given_bias is None else given_bias.cpu()
            want_weights, want = reference.gate_topk(logits.cpu(), on_cpu, rule)
            assert torch.equal(chosen.cpu(), want), rule
            near(weights, want_weights, 1e-6, f"weights of {rule}")
            assert ((weights.cpu() - want_weights).abs() <= 1e-5 * want_weights + 1e-30).all(), rule
            cpu_weights, cpu_chosen = ops.gate_topk(logits.cpu(), on_cpu, rule)
            assert torch.equal(chosen.cpu(), cpu_chosen)
            near(weights, cpu_weights, 1e-6, f"weights of {rule}, beside the CPU's")


def given_experts(draw: Draw) -> None:
    """As a table gives them, in its order: weights of the layer's own scores; padding goes nowhere."""
    rule, experts = GATES[0], 256
    logits, token = draw.normal(9, experts, scale=8), draw.integers(0, 50, 9)
    token[[2, 7]] = -1
    table = draw.normal(50, experts).argsort(dim=1)[:, : rule.top_k]
    given = table[token.clamp(min=0)]
    weights, chosen = cuda.gate_topk(logits, None, rule, token, given)
    want_weights, want = reference.gate_topk(logits.cpu(), None, rule, given.cpu())
    near(weights, want_weights, 1e-6, "weights of given experts")
    want = want.masked_fill(token.cpu().view(-1, 1) < 0, -1)
    assert torch.equal(chosen.cpu(), want)
    slot = draw.integers(0, 999, experts + 1)
    same_weights, chosen, slots = cuda.gate_slots(logits, None, rule, token, slot, given)
    assert torch.equal(same_weights, weights) and torch.equal(chosen.cpu(), want)
    assert torch.equal(slots.cpu(), slot.cpu()[want])


def cut_activations(draw: Draw) -> None:
    """Alone and quantised."""
    for rows, size in ((3, 96), (2, 1536), (0, 96)):
        for dtype in DTYPES:
            x = draw.normal(rows, 2 * size, dtype=dtype, scale=3)
            want = reference.silu_mul(x.cpu().float(), LIMIT)
            what = f"{dtype} {rows}x{size}, cut"
            near(cuda.silu_mul(x, LIMIT), want, ROUNDING[dtype], what)
            data, scale = silu_mul_quantize(x, 16, LIMIT)
            back = data.float() * scale.repeat_interleave(128, 1)[:, :size]
            near(back[:rows], want, 0.08, f"e4m3 {what}")
            got, want_rows = silu_mul_quantize_int8(x, limit=LIMIT), quantize_rows_int8(cuda.silu_mul(x, LIMIT))
            assert torch.equal(got[0], want_rows[0]) and torch.equal(got[1], want_rows[1]), what
    x = torch.tensor([[float("nan"), 2.0, -9.0, 1.0, float("nan"), -2.0]], device=draw.device)
    got = cuda.silu_mul(x, 1.0)[0]
    assert got[:2].isnan().all() and not got[2].isnan(), "NaN stays NaN"


def cut_factors(draw: Draw) -> None:
    """As the left factor of a product."""
    x, w = draw.normal(5, 512, scale=3), draw.normal(96, 256, scale=1 / 16)
    want = reference.silu_mul(x.cpu(), LIMIT) @ w.cpu().T
    near(cuda.silu_linear(x, Weight(w), LIMIT), want, 4e-6, "silu_linear fp32, cut")
    for convert, tolerance in ((lambda w: Weight(w.bfloat16()), 8e-3), (quantize_fp8, 0.08), (quantize_int8, 0.03)):
        weight = convert(w.cpu())
        want = reference.silu_mul(x.bfloat16().cpu().float(), LIMIT) @ weight.dequantize().T
        got = cuda.silu_linear(x.bfloat16(), weight_on(draw.device, weight), LIMIT)
        near(got, want, tolerance, f"silu_linear {weight.data.dtype}, cut")


def _cut_experts(draw: Draw, convert: Callable[[Tensor], Weight], tolerance: float) -> None:
    """With few rows, and as if there were many, which other kernels compute."""
    hidden, width = (256, 256) if draw.device == "cuda" else (128, 128)
    count = torch.tensor([21, 0, 3], dtype=torch.int32)
    one = convert(draw.normal(3, 2 * width, hidden, scale=3 * hidden**-0.5).cpu())
    two = convert(draw.normal(3, hidden, width, scale=width**-0.5).cpu())
    x = draw.normal(24, hidden, dtype=torch.float32 if one.data.dtype == torch.float32 else torch.bfloat16)
    want = reference.grouped_experts(x.cpu(), count, one, two, LIMIT)
    free = reference.grouped_experts(x.cpu(), count, one, two)
    assert (want - free).norm() > 0.2 * want.norm(), "the limit must show"
    on_device, there = [weight_on(draw.device, w) for w in (one, two)], count.to(draw.device)
    got = cuda.grouped_experts(x, there, *on_device, limit=LIMIT)
    near(got, want, tolerance, f"cut experts of {one.data.dtype}")
    room = torch.cat((x, torch.full_like(x, float("nan")).repeat(10, 1)))
    many = cuda.experts_up(room, there, on_device[0], expected_rows=len(room), limit=LIMIT)
    got = cuda.experts_down(many, on_device[1])[:24]
    near(got, want, tolerance, f"cut experts of {one.data.dtype}, as if many")


def cut_experts(draw: Draw) -> None:
    _cut_experts(draw, Weight, 6e-6)
    _cut_experts(draw, quantize_fp4, 8e-3)


def cut_bf16_experts(draw: Draw) -> None:
    _cut_experts(draw, lambda w: Weight(w.bfloat16()), 8e-3)


def cut_fp8_experts(draw: Draw) -> None:
    _cut_experts(draw, quantize_fp8, 0.12)


def cut_int8_experts(draw: Draw) -> None:
    _cut_experts(draw, quantize_int8, 0.03)


def planes(draw: Draw) -> None:
    """Plane j has the columns 4 i + j: of rows that lie apart, that came as e4m3, that have others behind them."""
    for rows, size in ((3, 32), (5, 2080), (0, 64)):
        x = draw.normal(rows, size + 8, dtype=torch.bfloat16)[:, :size]
        want = x.unflatten(1, (-1, 4)).permute(2, 0, 1)
        assert torch.equal(to_planes(x), want), (rows, size)
        data, scale = quantize_rows(x)
        wide = (data.float() * scale.repeat_interleave(128, 1)[:, :size]).bfloat16()
        assert torch.equal(to_planes(data, scale), to_planes(wide)), (rows, size)
    x, count = draw.normal(6, 64, dtype=torch.bfloat16), torch.tensor([2, 0, 1], dtype=torch.int32)
    assert torch.equal(to_planes(x, None, count.to(draw.device))[:, :3], to_planes(x)[:, :3])


def fp4_values(draw: Draw) -> None:
    """Every code under every scale is, behind the product with 1, what it is; a code never reaches another column."""
    least = 27 if draw.device == "cuda" else 34  # the interpreter does not read subnormal numbers of bfloat16
    for k, first in ((256, least), (288, 90)):
        n = 160 - first
        data = draw.integers(0, 256, n, k // 2).to(torch.uint8)
        data[:, :8] = torch.arange(8, device=draw.device, dtype=torch.uint8) * 34 + 16
        scale = first + torch.arange(n, device=draw.device)[:, None] + torch.arange(k // 32, device=draw.device) % 2
        weight = Weight(data, scale.to(torch.uint8))
        want = weight.dequantize().T
        ones = torch.eye(k, device=draw.device)
        tiling = None if k == 256 else Tiling(16, 64, 128, 4, 3, 2)
        got = grouped_gemm(ones.bfloat16(), weight, dtype=torch.float32, tiling=tiling)[0]
        assert torch.equal(got, want), f"K {k}, {tiling}: {(got != want).sum()} of {want.numel()} differ"
        assert torch.equal(grouped_gemm(ones, weight)[0], want), f"K {k}, in float32"
        stack = Weight(torch.stack((data.flip(0), data)), torch.stack((weight.scale, weight.scale)))
        assert torch.equal(fp4_matrix(stack, 1).float(), want.T), f"K {k}, as bfloat16"


def fp4_experts(draw: Draw) -> None:
    """Some without rows, one with most, their matrices in any order among others, NaN behind the rows."""
    _fp4_experts(draw, torch.tensor([21, 0, 5, 1], dtype=torch.int32), 96, 64)
    _fp4_experts(draw, torch.tensor([0, 0, 0, 40], dtype=torch.int32), 64, 32)


def fp4_experts_with_many_rows(draw: Draw) -> None:
    _fp4_experts(draw, torch.tensor([150, 0, 5, 330], dtype=torch.int32), 256, 512)


def _fp4_experts(draw: Draw, counts: Tensor, hidden: int, width: int) -> None:
    count, filled, num_buffers = counts.to(draw.device), int(counts.sum()), len(counts) + 2
    buffer = torch.randperm(num_buffers, generator=draw.generator)[: len(counts)].int()
    w13 = quantize_fp4(draw.normal(num_buffers, 2 * width, hidden, scale=hidden**-0.5).cpu())
    w2 = quantize_fp4(draw.normal(num_buffers, hidden, width, scale=width**-0.5).cpu())
    placed = [experts_at(w, buffer) for w in (w13, w2)]
    on_device, matrix = [weight_on(draw.device, w) for w in (w13, w2)], buffer.to(draw.device)
    x = draw.normal(filled + 5, hidden)
    x[filled:] = float("nan")
    what = f"fp4 experts {counts.tolist()} of {hidden}x{width}"
    got = cuda.grouped_experts(x, count, *on_device, None, matrix, limit=7.0)[:filled]
    want = reference.grouped_experts(x[:filled].cpu(), counts, *placed, 7.0)
    near(got, want, 6e-6, f"{what}, float32 rows")
    x = x.bfloat16()
    out = torch.full_like(x, float("nan"))
    assert cuda.grouped_experts(x, count, *on_device, out, matrix, limit=7.0) is out and out[filled:].isnan().all()
    near(out[:filled], reference.grouped_experts(x[:filled].cpu(), counts, *placed, 7.0), 8e-3, what)
    data, scale = quantize_rows(x)
    came = (data.float() * scale.repeat_interleave(128, 1)[:, :hidden]).bfloat16()
    want = cuda.grouped_experts(came, count, *on_device, None, matrix)[:filled]
    got = cuda.grouped_experts(data, count, *on_device, None, matrix, scale)[:filled]
    near(got, want, 0, f"{what}: rows that came as fp8")
    room = torch.cat((x, x.new_full((130 * len(count), hidden), float("nan"))))
    halves = cuda.experts_up(room, count, on_device[0], matrix, expected_rows=len(room), limit=7.0)
    near(cuda.experts_down(halves, on_device[1], num_sms=2)[:filled], out[:filled], 4e-3, f"{what}, in tall tiles")


def _random_fp4(draw: Draw, experts: int, n: int, k: int) -> Weight:
    data = draw.integers(0, 256, experts * n * k // 2).to(torch.uint8).view(experts, n, k // 2)
    scale = (draw.integers(118, 122, experts * n * k // 32)).to(torch.uint8).view(experts, n, k // 32)
    return Weight(data, scale)


def fp4_signals(draw: Draw) -> None:
    """The second product tells of every tile that has rows, and of no other; its result does not depend on that."""
    count = torch.tensor([21, 0, 16, 1], dtype=torch.int32, device=draw.device)
    w13, w2 = (
        weight_on(draw.device, quantize_fp4(draw.normal(4, *shape, scale=0.08).cpu()))
        for shape in ((256, 160), (160, 128))
    )
    inner = cuda.experts_up(draw.normal(43, 160, dtype=torch.bfloat16), count, w13, expected_rows=38)
    want = cuda.experts_down(inner, w2)[:38]
    for block_m, slots in ((16, 3), (128, 1)):
        counter = torch.zeros(4 * slots, dtype=torch.int32, device=draw.device)
        got = cuda.experts_down(inner, w2, signal=Counters(counter, block_m, slots), num_sms=2)[:38]
        near(got, want, 4e-3, f"fp4 signals, tiles of {block_m}")
        ready = (count[:, None] > torch.arange(slots, device=draw.device) * block_m) * 160
        assert torch.equal(counter.view(4, slots), ready.int()), (block_m, counter)


def fp4_linears(draw: Draw) -> None:
    """Dense products with fp4 weights are those with their values."""
    for rows, n, k in ((7, 96, 160), (40, 130, 512), (0, 16, 32)):
        weight, bias = quantize_fp4(draw.normal(n, k, scale=k**-0.5).cpu()), draw.normal(n)
        on_device = weight_on(draw.device, weight)
        for dtype, tolerance in ((torch.float32, 4e-6), (torch.bfloat16, 6e-3)):
            x = draw.normal(rows, k, dtype=dtype)
            want = reference.linear(x.cpu(), weight, bias.cpu())
            near(cuda.linear(x, on_device, bias), want, tolerance, f"fp4 linear {dtype} {rows}x{n}x{k}")


def replays(draw: Draw) -> None:
    """Gate and experts in a CUDA graph, whose tokens, scores and placement change between replays."""
    if draw.device != "cuda":
        return
    rule, experts, hidden, width, tokens = GATES[0], 16, 512, 256, 24
    weights = [
        quantize_fp4(draw.normal(18, *shape, scale=0.05).cpu()) for shape in ((2 * width, hidden), (hidden, width))
    ]
    on_gpu = [weight_on("cuda", w) for w in weights]
    table = draw.normal(50, experts).argsort(dim=1)[:, : rule.top_k]
    x, logits = draw.normal(tokens, hidden, dtype=torch.bfloat16), draw.normal(tokens, experts)
    token, buffer = draw.integers(0, 50, tokens), torch.arange(experts, dtype=torch.int32, device="cuda")

    def computed() -> tuple[Tensor, Tensor]:
        _, chosen = cuda.gate_topk(logits, None, rule, token, table[token.clamp(min=0)])
        row, source, count = cuda.place_rows(chosen, experts)
        return row, cuda.grouped_experts(x[source.clamp(min=0)], count, *on_gpu, None, buffer, limit=LIMIT)

    computed()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        row, y = computed()
    for _ in range(3):
        x.copy_(draw.normal(tokens, hidden, dtype=torch.bfloat16))
        token.copy_(draw.integers(-1, 50, tokens))
        buffers = torch.randperm(18, generator=draw.generator)[:experts].int()
        buffer.copy_(buffers)
        graph.replay()
        chosen = table.cpu()[token.cpu().clamp(min=0)].masked_fill(token.cpu()[:, None] < 0, -1)
        placed = [experts_at(w, buffers) for w in weights]
        for expert in range(experts):
            mine, k = (chosen == expert).nonzero().unbind(1)
            only = torch.zeros(experts, dtype=torch.int32)
            only[expert] = len(mine)
            want = reference.grouped_experts(x.cpu()[mine], only, *placed, LIMIT)
            near(y.cpu()[row.cpu()[mine, k]], want, 8e-3, f"replayed, expert {expert}")
        assert (row.cpu()[token.cpu() < 0] == -1).all()


def large(draw: Draw) -> None:
    """Widths of V4-Flash; few rows and many."""
    w13, w2 = _random_fp4(draw, 4, 4096, 4096), _random_fp4(draw, 4, 4096, 2048)
    for counts in ((1, 0, 7, 30), (200, 65, 0, 513)):
        x, count = draw.normal(sum(counts), 4096, dtype=torch.bfloat16), torch.tensor(counts, dtype=torch.int32)
        got = cuda.grouped_experts(x, count.to(draw.device), w13, w2, limit=7.0)
        want = reference.grouped_experts(x.cpu(), count, *(weight_on("cpu", w) for w in (w13, w2)), 7.0)
        near(got, want, 8e-3, f"rows {counts} of 4096 x 2048")


CUT = (cut_activations, cut_factors, cut_experts, cut_bf16_experts, cut_fp8_experts, cut_int8_experts)
FP4 = (planes, fp4_values, fp4_experts, fp4_signals, fp4_linears)
SMALL = (gates, given_experts, *CUT, *FP4)
ALL = (*SMALL, fp4_experts_with_many_rows, replays, large)
