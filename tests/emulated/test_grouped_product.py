"""The grouped bfloat16 product without a GPU: every unit, every number of boxes, against torch in fp32."""

import ctypes
import platform
import shutil
from types import SimpleNamespace

import pytest
import torch

from eprt.gpu import grouped_product
from eprt.gpu.grouped_product import GroupedProductParams, shared_bytes, source
from tests.emulated.kernels import library
from tests.reference_ops import silu_mul

pytestmark = pytest.mark.skipif(
    platform.machine() != "x86_64" or shutil.which("g++") is None, reason="needs g++ on x86-64"
)


class LaunchOnHost:
    def __init__(self, gated: bool):
        self.params, self.library = GroupedProductParams(), library(source(gated), "eprt::grouped_product")

    def __call__(self, num_blocks: int, stream: int) -> None:
        self.library.launch(ctypes.byref(self.params), num_blocks, grouped_product._THREADS, shared_bytes() + 1024)


@pytest.fixture
def on_host(monkeypatch):
    launches = {gated: LaunchOnHost(gated) for gated in (False, True)}
    words = ctypes.c_uint64 * 16
    monkeypatch.setattr(grouped_product, "byte_matrix", lambda *place: words(*place))
    monkeypatch.setattr(grouped_product, "_launch", lambda device, gated: launches[gated])
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0))


CASES = [
    ([16], 256, 64, 2),
    ([40, 0, 3], 300, 200, 4),
    ([0, 177, 0, 1, 193, 0], 516, 72, 2),
    ([1, 16, 17, 33, 63, 70, 90, 100, 121, 130, 150, 170, 176], 136, 320, 6),
    ([360, 0, 540], 300, 72, 4),  # three and four tiles of rows
    ([0, 0], 8, 8, 2),
]


@pytest.mark.parametrize("placed", [False, True])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("counts, n, k, num_sms", CASES)
def test_the_product_is_that_of_each_expert_with_its_own_matrix(on_host, counts, n, k, num_sms, gated, placed):
    """Rows past the last expert's stay as they were; so do their neighbours' columns."""
    draw, n = torch.Generator().manual_seed(len(counts) * n + k), n // 8 * 8 if gated else n
    w = (torch.randn(len(counts) + 1, n * (1 + gated), k, generator=draw) * k**-0.5).bfloat16()
    x = torch.randn(sum(counts) + 5, k, generator=draw).bfloat16()
    order = torch.randperm(len(w), generator=draw)[: len(counts)].int() if placed else torch.arange(len(counts)).int()
    y = torch.full((len(x), n), 77.0, dtype=torch.bfloat16)
    count = torch.tensor(counts, dtype=torch.int32)
    grouped_product.grouped_product(x, w, count, order if placed else None, y, gated, num_sms)
    wants = [rows.float() @ w[e].float().T for rows, e in zip(x.split([*counts, 5]), order.tolist())]
    want = torch.cat(wants)
    if gated:
        gate, up = want.chunk(2, 1)
        want = torch.nn.functional.silu(gate) * up
    torch.testing.assert_close(y[: sum(counts)].float(), want, rtol=8e-3, atol=1e-5)
    assert (y[sum(counts) :] == 77).all()


def test_the_limit_cuts_what_enters_silu_and_what_it_is_multiplied_by(on_host):
    """NaN stays NaN, with a limit and without."""
    draw = torch.Generator().manual_seed(0)
    w, x = (torch.randn(*shape, generator=draw).bfloat16() for shape in ((1, 2 * 64, 64), (20, 64)))
    x[3] = float("nan")
    for limit in (1.5, None):
        y, count = torch.empty(20, 64, dtype=torch.bfloat16), torch.tensor([20], dtype=torch.int32)
        grouped_product.grouped_product(x, w, count, None, y, True, 2, limit)
        want = silu_mul(x.float() @ w[0].float().T, limit)
        torch.testing.assert_close(y.float(), want, rtol=8e-3, atol=1e-3, equal_nan=True)
        assert y[3].isnan().all() and not y[4].isnan().any()
