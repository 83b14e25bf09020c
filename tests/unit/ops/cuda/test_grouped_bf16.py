"""Which products of bfloat16 experts are computed in large tiles. (What is computed: tests/emulated, tests/gpu.)"""

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from eprt.gpu import grouped_product
from eprt.ops.cuda import experts
from eprt.ops.cuda.grouped_bf16 import LEAST_ROWS, grouped_bf16
from eprt.ops.weight import Weight

HIDDEN, WIDTH, EXPERTS = 64, 32, 3
ROWS = LEAST_ROWS * EXPERTS


@pytest.fixture
def calls(monkeypatch):
    """What the kernel was called with; it fills y with the number of the call."""
    made = []

    def product(x, w, count, matrix, y, gated, num_sms, limit):
        assert limit == (7.0 if gated else None), "cuts what enters silu, and nothing else"
        made.append((w, matrix, gated, num_sms))
        y.fill_(len(made))

    monkeypatch.setattr(grouped_product, "is_built", lambda device, gated: True)
    monkeypatch.setattr(grouped_product, "grouped_product", product)
    return made


def rows(count: int = ROWS, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.zeros(count, HIDDEN, dtype=dtype)


def weights(dtype: torch.dtype = torch.bfloat16) -> tuple[Weight, Weight]:
    shapes = (EXPERTS, 2 * WIDTH, HIDDEN), (EXPERTS, HIDDEN, WIDTH)
    return Weight(torch.zeros(shapes[0], dtype=dtype)), Weight(torch.zeros(shapes[1], dtype=dtype))


COUNT = torch.zeros(EXPERTS, dtype=torch.int32)


def test_many_rows_per_expert_are_computed_in_large_tiles(calls):
    w13, w2 = weights()
    y = grouped_bf16(rows(), w13, COUNT, None, gated=True, limit=7.0)
    assert y is not None and y.shape == (ROWS, WIDTH) and (y == 1).all()
    out = torch.zeros(ROWS, HIDDEN, dtype=torch.bfloat16)
    assert grouped_bf16(torch.zeros_like(y), w2, COUNT, COUNT, out_RN=out, num_sms=100) is out and (out == 2).all()
    assert [(gated, sms) for _, _, gated, sms in calls][1] == (False, 100)
    assert calls[0][0] is w13.data and calls[0][1] is None and calls[1][1] is COUNT


def test_others_are_not(calls, monkeypatch):
    w13, _ = weights()
    assert grouped_bf16(rows(ROWS - 1), w13, COUNT, None, gated=True) is None, "few rows"
    assert grouped_bf16(rows(4 * ROWS), w13, COUNT, None, gated=True, expected_rows=ROWS - 1) is None
    assert grouped_bf16(rows(), w13, COUNT, None, gated=True, dtype=torch.float32) is None
    wide = torch.zeros(ROWS, WIDTH)
    assert grouped_bf16(rows(), w13, COUNT, None, gated=True, out_RN=wide) is None, "float32 results"
    assert grouped_bf16(rows(dtype=torch.float32), weights(torch.float32)[0], COUNT, None, gated=True) is None
    odd = Weight(torch.zeros(EXPERTS, 2 * WIDTH, HIDDEN - 4, dtype=torch.bfloat16))
    assert grouped_bf16(rows()[:, :-4].contiguous(), odd, COUNT, None, gated=True) is None, "TMA cannot load its rows"
    monkeypatch.setattr(grouped_product, "is_built", lambda device, gated: False)
    assert grouped_bf16(rows(), w13, COUNT, None, gated=True) is None
    assert not calls


def test_both_products_of_a_layer_use_it_and_one_that_tells_its_tiles_does_not(calls, monkeypatch):
    w13, w2 = weights()
    y = experts.grouped_experts(rows(), COUNT, w13, w2, matrix_E=COUNT, num_sms=88, limit=7.0)
    assert y.shape == (ROWS, HIDDEN) and y.dtype == torch.bfloat16 and (y == 2).all()
    assert [(gated, sms) for _, _, gated, sms in calls] == [(True, 88), (False, 88)]
    told = []
    monkeypatch.setattr(experts, "grouped_gemm", lambda *args, **kwargs: told.append(kwargs["signal"]) or (y, None))
    gated = experts.experts_up(rows(), COUNT, w13, limit=7.0)
    signal: Any = object()
    assert experts.experts_down(gated, w2, signal=signal) is y and told == [signal] and len(calls) == 3
