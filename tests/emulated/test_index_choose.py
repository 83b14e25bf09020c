"""The indexer's choice on Hopper without a GPU: every way through the kernel against torch's sort."""

import ctypes
import platform
import shutil
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from eprt.gpu import index_choose
from eprt.gpu.index_choose import IndexChooseParams
from tests.emulated.kernels import library

pytestmark = pytest.mark.skipif(
    platform.machine() != "x86_64" or shutil.which("g++") is None, reason="needs g++ on x86-64"
)
PAGE = 16


class LaunchOnHost:
    def __init__(self, ctas: int, words: int):
        self.params, self.threads = IndexChooseParams(), index_choose.threads_of(ctas)
        self.shared_bytes = index_choose.shared_bytes(ctas, words) + 1024
        self.library = library(index_choose.source(ctas, words), "eprt::index_choose")

    def __call__(self, num_blocks: int, stream: int) -> None:
        self.library.launch(ctypes.byref(self.params), num_blocks, self.threads, self.shared_bytes)


@pytest.fixture(params=[1, 2])
def on_host(monkeypatch, request):
    """Thread blocks of a row."""
    monkeypatch.setattr(index_choose, "_choose", lambda device, ctas, words: LaunchOnHost(ctas, words))
    monkeypatch.setattr(index_choose, "ctas_of", lambda rows, processors: request.param)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=132))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: SimpleNamespace(cuda_stream=0))


def chosen(score_SX: list[Tensor], top_k: int) -> tuple[Tensor, Tensor]:
    """(slots by the kernel, by sorting). Memory behind the scores holds NaN and infinity."""
    rng, longest = torch.Generator().manual_seed(3), max(len(score) for score in score_SX)
    pages = -(-longest // PAGE) + 1
    score_XS = torch.full((len(score_SX), pages * PAGE), torch.inf)
    score_XS[:, ::3] = torch.nan
    table_BP = torch.stack([torch.randperm(pages, generator=rng) + 7 for _ in score_SX]).int()
    want_XK = torch.full((len(score_SX), top_k), -1, dtype=torch.int32)
    for x, score in enumerate(score_SX):
        score_XS[x, : len(score)] = score
        best = score.nan_to_num(-torch.inf, torch.inf, -torch.inf) + 0.0
        position = best.sort(descending=True, stable=True).indices[:top_k].sort().values
        want_XK[x, : len(position)] = table_BP[x][position // PAGE] * PAGE + position % PAGE
    slot_XK = torch.full_like(want_XK, -9)
    order = torch.arange(len(score_SX), dtype=torch.int32)
    length_X = torch.tensor([len(score) for score in score_SX], dtype=torch.int32)
    index_choose.choose(slot_XK, score_XS, table_BP, order, length_X, PAGE)
    return slot_XK, want_XK


def test_every_way_through_the_kernel(on_host):
    draw = torch.Generator().manual_seed(1)

    def normal(length: int) -> Tensor:
        return torch.randn(length, generator=draw)

    few = torch.randint(-2, 3, (9000,), generator=draw).float()
    strange = normal(10000)
    strange[::7], strange[5::11], strange[3::13] = torch.nan, -0.0, torch.inf
    rows = [
        normal(0),
        normal(300),
        normal(301),
        normal(8192),
        normal(12001),  # a guess
        normal(20000).exp(),
        torch.arange(9001.0),  # the best lie together
        torch.zeros(8500),  # too many reach the guess
        few,
        strange,
        1 + normal(9000) * 1e-6,
        torch.full((9000,), torch.nan),
    ]
    got, want = chosen(rows, 300)
    for x in range(len(rows)):
        assert torch.equal(got[x], want[x]), x


def test_many_are_chosen_of_few(on_host):
    rows = [torch.randn(length, generator=torch.Generator().manual_seed(length)) for length in (2049, 4096, 8300)]
    got, want = chosen(rows, 2048)
    assert torch.equal(got, want)


def test_a_guess_too_high_is_mended(on_host):
    """The sample has only scores above the others."""
    score = torch.randn(16384, generator=torch.Generator().manual_seed(5))
    pieces = index_choose.threads_of(1) * 2
    at = (torch.arange(pieces) * (len(score) // 4) // pieces * 4)[:, None] + torch.arange(4)
    score[at.flatten()] += 100
    for top_k in (3000, 7000):
        got, want = chosen([score], top_k)
        assert torch.equal(got, want)
