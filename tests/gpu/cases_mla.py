"""Latent attention's own kernels on Hopper against float64.

Lengths, pages and rows of every kind, NaN where nothing was written. Knows eprt/gpu/mla_decode.py, not the registry
above it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eprt.gpu import mla_decode
from tests.gpu.draw import Draw

SCALE = 0.13  # of scores: sharp enough that the largest score changes in the middle of a context
TOLERANCE = 4e-3


@dataclass
class Case:
    """A batch of requests."""

    heads: int
    lengths: list[int]
    page_size: int = 64
    tokens: list[int] | None = None  # new ones of each request; None: one each
    sharpness: float = 1.0  # of the queries

    @property
    def num_tokens(self) -> int:
        return len(self.lengths) if self.tokens is None else sum(self.tokens)


CASES = (
    Case(64, [64]),
    Case(128, [64]),
    Case(128, [37, 128, 200, 1, 129]),
    Case(128, [1000] * 3, sharpness=8.0),
    Case(128, [4096] * 70),
    Case(128, [20000]),
    Case(128, [131072, 5, 60000, 777]),
    Case(128, [0, 5, 0, 700, 0]),
    Case(16, [1, 100, 5000, 0, 77]),
    *(Case(128, [1, 15, 16, 17, 63, 64, 65, 255, 256, 257, 3001], size) for size in (16, 32, 64, 256)),
    Case(128, [500, 4, 70, 65, 1], tokens=[4, 4, 2, 0, 1]),
    Case(64, [500, 4, 70, 1300, 1], 16, [4, 4, 2, 3, 1]),
    Case(16, [500, 4, 70, 1300, 1], 256, [4, 4, 2, 3, 1]),
    Case(32, [700, 90], 64, [150, 90]),
    *(Case(heads, [2048, 1, 0, 63, 64, 65, 2047, 700, 5000], 1) for heads in (16, 64, 128)),
    Case(128, [2048] * 200, 1),
    Case(128, [2048, 300, 1], 1, [2, 3, 1]),
)


@dataclass
class Batch:
    """The tensors of a case. Page tables are too wide; entries that nobody uses are NaN, pages that nobody has too."""

    q_TND: Tensor
    kv_pages: Tensor
    page_table_BP: Tensor
    length_B: Tensor
    start_B1: Tensor | None

    @staticmethod
    def draw(case: Case, draw: Draw) -> "Batch":
        size, lengths = case.page_size, case.lengths
        needed = [-(-length // size) for length in lengths]
        order = torch.randperm(sum(needed) + 7, generator=draw.generator).tolist()
        table = torch.full((len(lengths), max(needed) + 3), 1 << 30, dtype=torch.int32)
        used = torch.zeros(len(order) * size, dtype=torch.bool)
        for row, length, pages in zip(table, lengths, needed):
            row[:pages] = torch.tensor(order[:pages])
            del order[:pages]
            position = torch.arange(length)
            used[row[position // size].long() * size + position % size] = True
        entries = draw.normal(len(used), 576, dtype=torch.bfloat16)
        entries[~used.to(draw.device)] = torch.nan
        start = None if case.tokens is None else torch.tensor([0, *case.tokens]).cumsum(0).int().to(draw.device)
        q = draw.normal(case.num_tokens, case.heads, 576, dtype=torch.bfloat16, scale=case.sharpness)
        length = torch.tensor(lengths, dtype=torch.int32).to(draw.device)
        return Batch(q, entries.view(-1, size, 576), table.to(draw.device), length, start)

    def schedule(self, whole: bool = False) -> mla_decode.MlaSchedule:
        tokens, heads, _ = self.q_TND.shape
        return mla_decode.make_schedule(self.length_B, self.start_B1, heads, tokens, whole)

    def attend(self, schedule: mla_decode.MlaSchedule | None = None) -> Tensor:
        where = self.kv_pages, self.page_table_BP, self.length_B, self.start_B1
        return mla_decode.mla_decode(self.q_TND, *where, SCALE, schedule or self.schedule())

    def oracle(self) -> Tensor:
        tokens, heads, _ = self.q_TND.shape
        out = torch.zeros(tokens, heads, 512, dtype=torch.float64, device=self.q_TND.device)
        start = list(range(tokens + 1)) if self.start_B1 is None else self.start_B1.tolist()
        for b, length in enumerate(self.length_B.tolist()):
            pages = self.page_table_BP[b, : -(-length // self.kv_pages.shape[1])].long()
            entries = self.kv_pages[pages].reshape(-1, 576)[:length].double()
            for t in range(start[b], start[b + 1]):
                seen = entries[: max(0, length - start[b + 1] + t + 1)]
                if len(seen):
                    weight = (self.q_TND[t].double() @ seen.T * SCALE).softmax(-1)
                    out[t] = weight @ seen[:, :512]
        return out


def _is_hopper() -> bool:
    return torch.cuda.get_device_capability() == (9, 0)


def _check(batch: Batch, what: str) -> None:
    want = batch.oracle()
    poison = torch.full((1 << 26,), torch.nan, device=want.device)  # what the kernels' own memory holds before
    del poison
    got = batch.attend()
    assert torch.equal(got, batch.attend()), what
    error = (got.double() - want).flatten(0, 1).norm(dim=1) / want.flatten(0, 1).norm(dim=1).clamp_min(1e-9)
    whole = ((got.double() - want).norm() / want.norm()).item()
    assert whole <= TOLERANCE and error.max() <= 3 * TOLERANCE, f"{what}: {whole:.1e}, worst row {error.max():.1e}"


def check_all(cases: Sequence[Case], draw: Draw) -> None:
    for case in cases if _is_hopper() else ():
        _check(Batch.draw(case, draw), str(case))


def latent_attention(draw: Draw) -> None:
    check_all(CASES, draw)


def random_latent_attention(draw: Draw) -> None:
    for i in range(20 if _is_hopper() else 0):
        requests = int(draw.integers(1, 40, 1))
        lengths = draw.integers(4, (80, 3000)[i % 2], requests).tolist()
        heads, size = ((16, 32, 64, 128)[i // 2 % 4], (16, 32, 64, 256, 1)[int(draw.integers(0, 5, 1))])
        tokens = draw.integers(0, 5, requests).tolist() if i % 3 else None
        case = Case(heads, lengths, size, tokens)
        if case.num_tokens:
            _check(Batch.draw(case, draw), str(case))


def shared_pages(draw: Draw) -> None:
    """Requests with a common prefix have the same pages, and say the same as requests with copies."""
    if _is_hopper():
        batch = Batch.draw(Case(128, [640] * 6), draw)
        batch.page_table_BP[1:, :9] = batch.page_table_BP[0, :9]
        _check(batch, "shared pages")


def whole_requests(draw: Draw) -> None:
    """Where no request is cut, a request has the same bits whatever the others are."""
    for heads, lengths in ((128, [4096, 37, 0, 900, 12000, 64]), (16, [700, 1, 3000])) if _is_hopper() else ():
        batch = Batch.draw(Case(heads, lengths), draw)
        together, want = batch.attend(batch.schedule(whole=True)), batch.oracle()
        assert (together.double() - want).norm() <= TOLERANCE * want.norm(), lengths
        for b in range(len(lengths)):
            one = slice(b, b + 1)
            alone = Batch(batch.q_TND[one], batch.kv_pages, batch.page_table_BP[one], batch.length_B[one], None)
            assert torch.equal(alone.attend(alone.schedule(whole=True))[0], together[b]), (heads, lengths, b)


def recorded_latent_attention(draw: Draw) -> None:
    """A recorded step whose lengths change, with one schedule for two layers."""
    if not _is_hopper():
        return
    batch = Batch.draw(Case(128, [4096, 4096, 4096, 4096]), draw)
    lengths, graph = batch.length_B.clone(), torch.cuda.CUDAGraph()
    batch.attend()
    with torch.cuda.graph(graph):
        schedule = batch.schedule()
        layers = [batch.attend(schedule) for _ in range(2)]
    for each in ([4096, 4096, 4096, 4096], [1, 4000, 65, 0], [4096, 1, 1, 1]):
        batch.length_B.copy_(torch.tensor(each, dtype=torch.int32))
        graph.replay()
        want = batch.attend()
        assert all(torch.equal(layer, want) for layer in layers), each
    batch.length_B.copy_(lengths)


ALL = (latent_attention, random_latent_attention, shared_pages, whole_requests, recorded_latent_attention)
