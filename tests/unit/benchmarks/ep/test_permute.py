"""Received rows into groups by expert and back, by Triton's interpreter, against plain loops."""

import os
import subprocess
import sys

import pytest

from tests.house.sources import ROOT

CHECK = """
import tests.interpreted  # before Triton
import torch
from benchmarks.ep.permute import group_rows, ungroup_rows

generator = torch.Generator().manual_seed(1)
for fp8 in (False, True):
    for rows, top_k, hidden, experts in ((37, 8, 384, 8), (0, 8, 384, 8), (5, 3, 128, 4), (9, 1, 128, 1)):
        choices = [torch.randperm(2 * max(experts, top_k), generator=generator)[:top_k] for _ in range(rows)]
        idx = torch.stack(choices) if rows else torch.empty(0, top_k, dtype=torch.int64)
        idx = torch.where(idx < experts, idx, -1)
        x, scale = torch.randn(rows, hidden, generator=generator).bfloat16(), None
        if fp8:
            x, scale = x.to(torch.float8_e4m3fn), torch.rand(rows, hidden // 128, generator=generator)
        counts = [int((idx == expert).sum()) for expert in range(experts)]
        got = group_rows(x, scale, idx, counts)
        assert got.count_E.tolist() == counts and len(got.x_GH) == sum(counts)
        taken = got.position_RK[idx >= 0]
        assert taken.sort().values.tolist() == list(range(sum(counts))), "every place once"
        assert (got.position_RK[idx < 0] == -1).all()
        first = torch.tensor([0, *counts]).cumsum(0)
        for row, k in (idx >= 0).nonzero().tolist():
            place, expert = int(got.position_RK[row, k]), int(idx[row, k])
            assert first[expert] <= place < first[expert + 1]
            assert torch.equal(got.x_GH[place].float(), x[row].float())
            assert scale is None or torch.equal(got.scale_GC[place], scale[row])
        weights = torch.rand(rows, top_k, generator=generator)
        y = torch.randn(sum(counts), hidden, generator=generator).bfloat16()
        out = ungroup_rows(y, got, weights)
        for row in range(rows):
            parts = [weights[row, k] * y[got.position_RK[row, k]].float() for k in range(top_k) if idx[row, k] >= 0]
            want = torch.stack(parts).sum(0) if parts else torch.zeros(hidden)
            torch.testing.assert_close(out[row].float(), want, rtol=2**-7, atol=2**-8)
print("the same rows and sums")
"""


def test_every_row_comes_to_its_groups_and_sums_come_back():
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", CHECK],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.stdout == "the same rows and sums\n", done.stdout + done.stderr
