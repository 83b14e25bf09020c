"""How agreement is counted."""

import math

import pytest
import torch

from benchmarks.gpu.bench_hf_agreement import compare


def test_positions_that_agree_and_divergence():
    want = [torch.tensor([[1.0, 0.0, 0.0], [0.0, 2.0, 0.0]]), torch.tensor([[0.0, 0.0, 3.0]])]
    assert compare(want, want) == (3, 0.0)
    other = [torch.tensor([[0.0, 1.0, 0.0], [0.0, 2.0, 0.0]]), torch.tensor([[0.0, 0.0, 3.0]])]
    same, divergence = compare(other, want)
    # Of the one position that differs: p = softmax(1, 0, 0) against softmax(0, 1, 0).
    top, low = math.e / (math.e + 2), 1 / (math.e + 2)
    assert same == 2 and divergence == pytest.approx(top - low, rel=1e-5)
