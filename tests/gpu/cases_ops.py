"""The GPU operators against the slow oracles: cases for a device. With TRITON_INTERPRET=1 the device may be the CPU."""

import math

import torch

from eprt.ops import cuda
from eprt.ops.cuda.quantize import quantize_rows
from eprt.ops.cuda.silu import silu_mul_quantize
from eprt.ops.gate import GateRule
from eprt.ops.rows import add_rows, place_rows, sum_rows
from tests import reference_ops as reference
from tests.gpu.draw import DTYPES, ROUNDING, Draw, cpu, near


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


def silu(draw: Draw) -> None:
    for dtype in DTYPES:
        for rows, size in ((3, 96), (2, 2048), (0, 64)):
            x = draw.normal(rows, 2 * size, dtype=dtype)
            near(cuda.silu_mul(x), reference.silu_mul(x.cpu()), ROUNDING[dtype], f"silu_mul {dtype} {rows}x{size}")
            for padded_to in (1, 16):
                data, scale = silu_mul_quantize(x, padded_to)
                back = (data.float() * scale.repeat_interleave(128, 1)[:, :size])[:rows]
                near(back, reference.silu_mul(x.cpu().float()), 0.08, f"silu_mul_quantize {dtype} {rows}x{size}")


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
        want_masked = want.masked_fill(token.cpu().view(-1, 1) < 0, -1)
        assert torch.equal(chosen.cpu(), want_masked), case
        slot = draw.integers(0, 999, experts + 1)
        same_weights, chosen, slots = cuda.gate_slots(logits, bias, rule, token, slot)
        assert torch.equal(same_weights, weights) and torch.equal(chosen.cpu(), want_masked), case
        assert torch.equal(slots.cpu(), slot.cpu()[want_masked]), case
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


def rows_out(draw: Draw) -> None:
    """Stable, with and without masked entries, in slots that get none, over several blocks of entries."""
    for tokens, top_k, slots in ((5, 4, 7), (1, 1, 3), (0, 2, 4), (700, 8, 5), (40, 8, 60)):
        for masked in (0, 1):
            for dtype in (torch.int32, torch.int64):
                slot = draw.integers(-masked, slots, tokens, top_k).to(dtype)
                got, want = cuda.place_rows(slot, slots), place_rows(slot.cpu(), slots)
                for name, one, other in zip(("row_TK", "token_R", "count_E"), got, want, strict=True):
                    assert one.dtype == other.dtype and torch.equal(one.cpu(), other), (name, tokens, slots, masked)


ALL = (norms, silu, gates, quantising, rows_out, rows_back)
