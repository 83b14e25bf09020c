"""Latent attention over an fp8 cache without a GPU: queries in e4m3, and the whole attention against float64."""

import ctypes
import platform
import shutil
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from eprt.gpu import mla_decode, mla_decode_fp8
from eprt.gpu.jit import KernelSource
from eprt.gpu.mla_decode import MlaSchedule, MlaScheduleParams, lengths_of
from eprt.ops.kv_format import KVFormat
from tests.emulated.kernels import library

pytestmark = pytest.mark.skipif(
    platform.machine() != "x86_64" or shutil.which("g++") is None, reason="needs g++ on x86-64"
)
ENTRY = KVFormat(512, 64, torch.uint8)
NAN = 0x7F


class LaunchOnHost:
    def __init__(self, source: KernelSource, params: ctypes.Structure, threads: int, shared_bytes: int = 0):
        self.params, self.threads, self.shared_bytes = params, threads, shared_bytes
        self.library = library(source, f"eprt::{source.name}")

    def __call__(self, num_blocks: int, stream: int) -> None:
        self.library.launch(ctypes.byref(self.params), num_blocks, self.threads, self.shared_bytes + 1024)


@pytest.fixture
def on_host(monkeypatch):
    words = ctypes.c_uint64 * 16

    def decode(device, ctas, terms, gather):
        source, threads = mla_decode_fp8.sources(ctas, terms, gather)["attention"], mla_decode_fp8._KERNELS[gather][1]
        return LaunchOnHost(source, mla_decode_fp8.MlaDecodeFp8Params(), threads, mla_decode_fp8.shared_bytes(terms))

    def quantize(device, terms):
        source = mla_decode_fp8.sources(1, terms)["mla_quantize"]
        return LaunchOnHost(source, mla_decode_fp8.MlaQuantizeParams(), 256)

    def combine(device, ctas):
        return LaunchOnHost(mla_decode.sources(ctas)["mla_combine"], mla_decode.MlaCombineParams(), 256)

    def pieces(address, rows, row_bytes, piece_bytes, box_rows):
        return words(address, rows, row_bytes, box_rows, 1, piece_bytes)

    def tiles(address, rows, row_bytes, count, box_rows, box_tiles):
        return words(address, rows, row_bytes, box_rows, box_tiles, 128)

    monkeypatch.setattr(mla_decode_fp8, "byte_tiles", lambda *place: words(*place, 128))
    monkeypatch.setattr(mla_decode_fp8, "strided_tiles", tiles)
    monkeypatch.setattr(mla_decode_fp8, "strided_pieces", pieces)
    monkeypatch.setattr(mla_decode_fp8, "_decode", decode)
    monkeypatch.setattr(mla_decode_fp8, "_quantize", quantize)
    monkeypatch.setattr(mla_decode, "_combine", combine)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0))


def schedule(length_B: Tensor, start_B1: Tensor | None, heads: int, ctas: int, shares: int) -> MlaSchedule:
    bound_S4 = torch.full((shares + 1, 4), -7, dtype=torch.int32)
    params = MlaScheduleParams(lengths_of(length_B, start_B1, heads), bound_S4.data_ptr(), shares, 5, 4)
    LaunchOnHost(mla_decode.sources(ctas)["mla_schedule"], params, 256)(1, 0)
    return MlaSchedule(ctas, bound_S4)


# ctas, terms, heads, lengths, tokens, page size, shares, scale of scores
CASES = [
    (1, 1, 16, [70], None, 64, 1, 0.02),
    (2, 1, 128, [5, 0, 200], None, 64, 2, 0.02),
    (2, 2, 64, [130, 3, 65], [2, 1, 3], 16, 1, 0.02),
    (2, 2, 70, [500], None, 64, 1, 0.2),
    (1, 1, 40, [90, 17], [1, 2], 32, 3, 0.02),
    (2, 1, 128, [70, 0, 200], None, 1, 2, 0.02),
    (1, 2, 16, [3, 64], None, 1, 1, 0.2),
]


@pytest.mark.parametrize("ctas, terms, heads, lengths, tokens, page_size, shares, scale", CASES)
def test_attention_is_that_over_the_decoded_cache(
    on_host, ctas, terms, heads, lengths, tokens, page_size, shares, scale
):
    """Pages in any order; NaN in entries that nobody wrote, and in partial results before."""
    draw = torch.Generator().manual_seed(sum(lengths))
    new = tokens or [1] * len(lengths)
    length_B = torch.tensor(lengths, dtype=torch.int32)
    start_B1 = None if tokens is None else torch.tensor([0, *tokens]).cumsum(0).int()
    pages = [-(-length // page_size) for length in lengths]
    order = torch.randperm(sum(pages) + 2, generator=draw).int().split([*pages, 2])
    table_BP = torch.full((len(lengths), max(pages) + 1), 1 << 30, dtype=torch.int32)
    entries = torch.full((sum(pages) + 2, page_size, 656), NAN, dtype=torch.uint8)
    q = torch.randn(sum(new), heads, 576, generator=draw).bfloat16()
    want, first = torch.zeros(sum(new), heads, 512, dtype=torch.float64), 0
    for b, (length, count) in enumerate(zip(lengths, new)):
        table_BP[b, : pages[b]] = order[b]
        stored = ENTRY.encode(torch.randn(length, 576, generator=draw))
        at = torch.arange(length)
        entries[order[b].long()[at // page_size], at % page_size] = stored
        kv = ENTRY.decode(stored).double()
        for t in range(count):
            seen = kv[: max(0, length - count + t + 1)]
            if len(seen):
                want[first + t] = (q[first + t].double() @ seen.T * scale).softmax(-1) @ seen[:, :512]
        first += count
    plan = schedule(length_B, start_B1, heads, ctas, shares)
    got = mla_decode_fp8.mla_decode_fp8(q, entries, table_BP, length_B, start_B1, scale, plan, terms).double()
    error = (got - want).norm(dim=-1) / want.norm(dim=-1).clamp_min(1e-9)
    assert (got - want).norm() <= 0.03 * want.norm() and error.max() <= 0.07


@pytest.mark.parametrize("terms, tolerance", [(1, 1 / 16), (2, 1 / 256)])
def test_queries_are_rounded_to_e4m3(on_host, terms, tolerance):
    """The second term has what the first leaves over; the rotated part is divided by the same scale."""
    q = torch.randn(3, 5, 576, generator=torch.Generator().manual_seed(1)).bfloat16() * 3
    q[1, 2, :512] = 0
    stored, scale = mla_decode_fp8.quantize_queries(q, terms)
    latents = stored[:, : 512 * terms].view(torch.float8_e4m3fn).float().view(15, terms, 512).sum(1) * scale[:, None]
    want, rotated = q.view(15, 576).float().split([512, 64], dim=1)
    largest = want.abs().amax(1, keepdim=True)
    assert ((latents - want).abs() <= tolerance * want.abs() + largest / 2**17).all()
    got = stored[:, 512 * terms :].contiguous().view(torch.bfloat16).float() * scale[:, None]
    assert torch.allclose(got, rotated, rtol=2**-8)
    assert torch.allclose(scale[:, None], (largest / 448).clamp_min(1e-12 / 448))
