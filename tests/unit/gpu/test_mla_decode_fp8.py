"""Latent attention's kernels for fp8 caches without a GPU: they compile, and Python and CUDA mean the same.

The attention itself is run in tests/gpu/cases_mla_fp8.py."""

import ctypes
import re

import pytest
import torch

from eprt.ep.nvlink import prebuild
from eprt.gpu import jit, mla_decode_fp8
from eprt.gpu.mla_decode import MlaSchedule
from eprt.gpu.mla_decode_fp8 import MlaDecodeFp8Params, MlaQuantizeParams, query_bytes, shared_bytes, sources
from eprt.ops.kv_format import KVFormat
from tests.unit.gpu.test_jit import cache, nvrtc, struct_fields  # noqa: F401 (fixtures)

MOST_SHARED_BYTES = 227 << 10


@pytest.mark.parametrize("ctas", [1, 2])
def test_kernels_compile_for_hopper_and_are_built_ahead(nvrtc, cache, ctas):  # noqa: F811
    for source in (*sources(ctas).values(), *sources(ctas, 2).values()):
        assert jit.cubin(source).startswith(b"\x7fELF")
    ahead = [one for _, one in prebuild.sources("sm_90a")]
    assert all(source in ahead for source in (*sources(ctas).values(), *sources(ctas, 2).values()))
    assert not any("fp8" in name for name, _ in prebuild.sources("sm_80") if "latent" in name)


def test_python_and_cuda_agree_on_parameters():
    kernels = (
        ("mla_quantize", MlaQuantizeParams),
        ("mla_decode_fp8", MlaDecodeFp8Params),
        ("mla_dense_fp8", MlaDecodeFp8Params),
    )
    for name, struct in kernels:
        fields = [field[0] for field in struct._fields_ if field[0] != "_"]
        assert struct_fields(jit.read_source(name), struct.__name__) == fields, name
    assert ctypes.sizeof(MlaDecodeFp8Params) % 64 == 0 and MlaDecodeFp8Params.scale.offset == 3 * 128


@pytest.mark.parametrize("terms", [1, 2])
@pytest.mark.parametrize("gather", [False, True])
def test_python_and_cuda_agree_on_sizes(terms, gather):
    name, threads = mla_decode_fp8._KERNELS[gather]
    text = jit.read_source(name)
    constant = {name: int(value) for name, value in re.findall(r"constexpr int (k\w+) = (\d+);", text)}
    assert (constant["kRows"], constant["kKeys"]) == (64, 64) and constant["kScaleBytes"] == mla_decode_fp8._SCALE_BYTES
    stages = {1: 4, 2: 3}[terms]
    assert "kStages = kTerms == 1 ? 4 : 3;" in text
    if gather:
        assert "kThreads = kConsumers + kWarpgroup;" in text and "kConsumers = 2 * kWarpgroup;" in text
        assert threads == 3 * 128
        of_rows, of_warps, places, barriers = 2 + 1 + 2 * 2, 2 * 4, 2 * 80, 2 * stages + 2
    else:
        assert "kThreads = 4 * kWarpgroup;" in text and "kSlots = 4;" in text and threads == 4 * 128
        of_rows, of_warps, places, barriers = 4 + 1 + 2 * 2 + 2, 4 * 4, 6 * 64, 2 * stages + 3 + 2 * 4 + 4 + 8
    tiles = 64 * query_bytes(terms) + stages * 64 * (512 + 128 + 16) + 2 * 64 * 128
    small = of_rows * 64 * 4 + of_warps * 4 + places + barriers * 8
    assert 1024 + tiles + small <= shared_bytes(terms) <= MOST_SHARED_BYTES
    assert query_bytes(terms) == 512 * terms + 128


def test_an_entry_is_what_the_cache_stores():
    assert KVFormat(512, 64, torch.uint8).width == mla_decode_fp8.ENTRY_BYTES
    entry = KVFormat(512, 64, torch.uint8).encode(torch.arange(1, 577.0)[None])[0]
    assert entry[:512].view(torch.float8_e4m3fn)[-1] == 256
    assert entry[512:640].view(torch.bfloat16)[0] == 256  # 513, rounded to 512
    assert entry[640:644].view(torch.float32) == 2  # the power of 2 above 512 / 448


def test_no_tokens_need_no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: None)
    schedule = MlaSchedule(2, torch.zeros(67, 4, dtype=torch.int32))
    q, empty = torch.empty(0, 128, 576, dtype=torch.bfloat16), torch.empty(0, dtype=torch.int32)
    pages = torch.empty(3, 64, 656, dtype=torch.uint8)
    out = mla_decode_fp8.mla_decode_fp8(q, pages, empty[None], empty, None, 1.0, schedule)
    assert out.shape == (0, 128, 512)
