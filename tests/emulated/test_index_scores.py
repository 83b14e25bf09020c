"""The indexer's scores on Hopper without a GPU: rows of several requests, pages of every size, against float64."""

import ctypes
import platform
import shutil
from types import SimpleNamespace

import pytest
import torch

from eprt.gpu import index_scores
from eprt.gpu.index_scores import IndexScoresParams
from eprt.ops.index_format import IndexFormat
from tests.emulated.kernels import library

pytestmark = pytest.mark.skipif(
    platform.machine() != "x86_64" or shutil.which("g++") is None, reason="needs g++ on x86-64"
)
ENTRY = IndexFormat(128, torch.uint8)


class LaunchOnHost:
    def __init__(self, queries: int):
        self.params, self.shared_bytes = IndexScoresParams(), index_scores.shared_bytes(queries) + 1024
        self.library = library(index_scores.source(queries), "eprt::index_scores")

    def __call__(self, num_blocks: int, stream: int) -> None:
        self.library.launch(ctypes.byref(self.params), num_blocks, index_scores._THREADS, self.shared_bytes)


@pytest.fixture
def on_host(monkeypatch):
    words = ctypes.c_uint64 * 16
    monkeypatch.setattr(index_scores, "byte_matrix", lambda *place: words(*place))
    monkeypatch.setattr(index_scores, "_scores", lambda device, queries: LaunchOnHost(queries))
    monkeypatch.setattr(index_scores, "_BLOCKS", {4: 2, 16: 2})
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0))


# Queries of a thread block, page size, (request, length) of rows
CASES = [
    (4, 64, [(0, 200), (1, 65), (1, 66), (2, 0), (3, 1), (0, 130)]),
    (16, 16, [*((0, length) for length in range(150, 171)), (2, 3), (1, 64), (1, 0), (1, 17), (1, 18), (1, 19)]),
    (16, 32, [(0, 70)]),
]


@pytest.mark.parametrize("queries, page_size, rows", CASES)
def test_scores_are_those_of_the_stored_keys(on_host, monkeypatch, queries, page_size, rows):
    """NaN in keys that nobody wrote, and between pages; nothing is written behind a row's length."""
    monkeypatch.setattr(index_scores, "queries_of", lambda rows, requests: queries)
    draw, longest = torch.Generator().manual_seed(len(rows)), max(length for _, length in rows)
    width = -(-longest // page_size)
    table_BP = torch.full((4, width), 1 << 30, dtype=torch.int32)
    memory = torch.full((4 * width, page_size * 132 + 48), 0x7F, dtype=torch.uint8)
    keys = memory[:, 16 : 16 + page_size * 132].unflatten(1, (page_size, 132))
    assert index_scores.reads(keys)
    order = torch.randperm(4 * width, generator=draw).int()
    for b in range(4):
        length = max([0, *(seen for request, seen in rows if request == b)])
        pages = -(-length // page_size)
        table_BP[b, :pages], order = order[:pages], order[pages:]
        at = torch.arange(length)
        keys[table_BP[b].long()[at // page_size], at % page_size] = ENTRY.encode(
            torch.randn(length, 128, generator=draw)
        )
    query = torch.randn(len(rows), 64, 128, generator=draw).to(torch.float8_e4m3fn)
    weight = torch.randn(len(rows), 64, generator=draw)
    request_X, length_X = torch.tensor(rows, dtype=torch.int32).T.contiguous()
    score_XS = torch.full((len(rows), width * page_size), 99.0)
    index_scores.index_scores(score_XS, query.view(torch.uint8), weight, keys, table_BP, request_X, length_X)
    for x, (b, length) in enumerate(rows):
        at = torch.arange(length)
        key = ENTRY.decode(keys[table_BP[b].long()[at // page_size], at % page_size]).double()
        want = ((query[x].double() @ key.T).relu() * weight[x].double()[:, None]).sum(0)
        assert torch.allclose(score_XS[x, :length].double(), want, rtol=1e-4, atol=1e-3), x
        assert (score_XS[x, length:] == 99).all()
