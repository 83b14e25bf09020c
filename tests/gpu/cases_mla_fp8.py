"""Latent attention's kernel for fp8 caches on Hopper against float64.

The oracle has the cache's values, so an error is the kernel's own: weights are rounded to e4m3, and so are queries,
which costs the more the sharper scores are. Knows eprt/gpu/mla_decode_fp8.py, not the registry above it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from eprt.gpu import mla_decode
from eprt.gpu.mla_decode_fp8 import mla_decode_fp8, quantize_queries
from eprt.ops.kv_format import KVFormat
from tests.gpu.cases_mla import CASES, SCALE, Batch, Case
from tests.gpu.draw import Draw

FLAT = 0.1  # of the queries: scores have a standard deviation of 0.3
TOLERANCE = 0.035  # of a batch; rows, whose context may be of two positions, have four times as much
ENTRY = KVFormat(512, 64, torch.uint8)
NAN = 0x7F  # of e4m3; two of them are a NaN of bfloat16, four of float32


@dataclass
class Fp8Batch:
    """A batch with an fp8 cache."""

    plain: Batch  # has the values of the entries
    entries: Tensor  # uint8 [pages, page_size, 656]; NaN where nobody wrote

    @staticmethod
    def draw(case: Case, draw: Draw) -> "Fp8Batch":
        batch = Batch.draw(case, draw)
        unused = batch.kv_pages[..., 0].isnan()
        entries = ENTRY.encode(batch.kv_pages.flatten(0, 1).nan_to_num(0.0)).unflatten(0, unused.shape)
        batch.kv_pages = ENTRY.decode(entries)
        entries[unused] = NAN
        return Fp8Batch(batch, entries)

    def attend(self, schedule: mla_decode.MlaSchedule | None = None) -> Tensor:
        b = self.plain
        schedule = schedule or b.schedule()
        return mla_decode_fp8(b.q_TND, self.entries, b.page_table_BP, b.length_B, b.start_B1, SCALE, schedule)


def _runs() -> bool:
    return torch.cuda.get_device_capability() == (9, 0)


def _check(batch: Fp8Batch, what: str, tolerance: float = TOLERANCE) -> None:
    want = batch.plain.oracle()
    poison = torch.full((1 << 26,), torch.nan, device=want.device)  # what the kernels' own memory holds before
    del poison
    got = batch.attend()
    assert torch.equal(got, batch.attend()), what
    error = (got.double() - want).flatten(0, 1).norm(dim=1) / want.flatten(0, 1).norm(dim=1).clamp_min(1e-9)
    whole = ((got.double() - want).norm() / want.norm()).item()
    assert whole <= tolerance and error.max() <= 4 * tolerance, f"{what}: {whole:.1e}, worst row {error.max():.1e}"


def check_all(cases: Sequence[Case], draw: Draw) -> None:
    for case in cases if _runs() else ():
        _check(Fp8Batch.draw(replace(case, sharpness=FLAT), draw), str(case))


def fp8_latent_attention(draw: Draw) -> None:
    check_all(CASES, draw)


def random_fp8_latent_attention(draw: Draw) -> None:
    for i in range(20 if _runs() else 0):
        requests = int(draw.integers(1, 40, 1))
        lengths = draw.integers(4, (80, 3000)[i % 2], requests).tolist()
        heads, size = ((16, 32, 64, 128)[i // 2 % 4], (16, 32, 64, 256, 1)[int(draw.integers(0, 5, 1))])
        tokens = draw.integers(0, 5, requests).tolist() if i % 3 else None
        case = Case(heads, lengths, size, tokens, FLAT)
        if case.num_tokens:
            _check(Fp8Batch.draw(case, draw), str(case))


def entries_of_every_size(draw: Draw) -> None:
    """Entries whose latents are small or zero beside others, and rows of queries alike."""
    if not _runs():
        return
    batch = Fp8Batch.draw(Case(128, [700, 64, 3], sharpness=FLAT), draw)
    plain = batch.plain
    plain.kv_pages[..., :512] *= 2.0 ** draw.integers(-6, 1, *plain.kv_pages.shape[:2])[..., None]
    plain.kv_pages[::3, ::5, :512] = 0
    plain.q_TND[:, ::4] *= 1e-3
    plain.q_TND[:, 1::16, :512] = 0
    unused = batch.entries[..., 0] == NAN
    batch.entries = ENTRY.encode(plain.kv_pages.flatten(0, 1)).unflatten(0, unused.shape)
    plain.kv_pages = ENTRY.decode(batch.entries)
    batch.entries[unused] = NAN
    _check(batch, "entries of every size", 2 * TOLERANCE)


def recorded_fp8_latent_attention(draw: Draw) -> None:
    """A recorded step whose lengths change, with one schedule for two layers."""
    if not _runs():
        return
    batch = Fp8Batch.draw(Case(128, [4096, 4096, 4096, 4096], sharpness=FLAT), draw)
    length_B, graph = batch.plain.length_B, torch.cuda.CUDAGraph()
    batch.attend()
    with torch.cuda.graph(graph):
        schedule = mla_decode.make_schedule(length_B, None, 128, 4)
        layers = [batch.attend(schedule) for _ in range(2)]
    for each in ([4096, 4096, 4096, 4096], [1, 4000, 65, 0], [4096, 1, 1, 1]):
        length_B.copy_(torch.tensor(each, dtype=torch.int32))
        graph.replay()
        want = batch.attend()
        assert all(torch.equal(layer, want) for layer in layers), each


def queries_in_e4m3(draw: Draw) -> None:
    """One term is the nearest e4m3 number, two are a hundred times as near; the rotated part keeps its bits but one."""
    if not _runs():
        return
    q = draw.normal(5, 7, 576, dtype=torch.bfloat16, scale=3.0)
    q[2, 3, :512] = 0
    for terms, tolerance in ((1, 1 / 16), (2, 1 / 256)):
        bytes_, scale = quantize_queries(q, terms)
        latents = bytes_[:, : 512 * terms].view(torch.float8_e4m3fn).float().view(35, terms, 512).sum(1)
        rope = bytes_[:, 512 * terms :].view(torch.bfloat16).float()
        want = q.view(35, 576).float()
        largest = want[:, :512].abs().amax(1, keepdim=True)
        assert (
            (latents * scale[:, None] - want[:, :512]).abs() <= tolerance * want[:, :512].abs() + largest / 2**17
        ).all()
        assert torch.allclose(rope * scale[:, None], want[:, 512:], rtol=2**-8)
        assert torch.allclose(scale[:, None], (largest / 448).clamp_min(1e-12 / 448))


ALL = (
    fp8_latent_attention,
    random_fp8_latent_attention,
    entries_of_every_size,
    recorded_fp8_latent_attention,
    queries_in_e4m3,
)
