"""Latent attention's kernels without a GPU: they compile, and Python and CUDA mean the same.

Their schedule and sums are run in tests/emulated/test_mla.py, the attention itself in tests/gpu/cases_mla.py."""

import ctypes
import re

import pytest
import torch

from eprt.ep.nvlink import prebuild
from eprt.gpu import jit, mla_decode
from eprt.gpu.mla_decode import (
    Bound,
    Lengths,
    MlaCombineParams,
    MlaDecodeParams,
    MlaScheduleParams,
    ctas_of,
    sources,
)
from tests.unit.gpu.test_jit import cache, nvrtc, struct_fields  # noqa: F401 (fixtures)

MOST_SHARED_BYTES = 227 << 10


@pytest.mark.parametrize("ctas", [1, 2])
def test_kernels_compile_for_hopper_and_are_built_ahead(nvrtc, cache, ctas):  # noqa: F811
    for source in sources(ctas).values():
        assert jit.cubin(source).startswith(b"\x7fELF")
        assert source in [one for _, one in prebuild.sources("sm_90a")]
        assert source not in [one for _, one in prebuild.sources("sm_80")]


def test_python_and_cuda_agree_on_parameters():
    for name, structs in (
        ("mla_schedule", (Bound, Lengths, MlaScheduleParams)),
        ("mla_decode", (MlaDecodeParams,)),
        ("mla_combine", (MlaCombineParams,)),
    ):
        text = jit.read_source(name)
        for struct in structs:
            fields = [field[0] for field in struct._fields_ if field[0] != "_"]
            assert struct_fields(text, struct.__name__) == fields, struct
    assert ctypes.sizeof(MlaDecodeParams) % 64 == 0 and MlaDecodeParams.kv.offset == 128


def test_python_and_cuda_agree_on_sizes():
    text = jit.read_source("mla_decode")
    constant = {name: int(value) for name, value in re.findall(r"constexpr int (k\w+) = (\d+);", text)}
    assert (constant["kRows"], constant["kKeys"]) == (mla_decode.ROWS, mla_decode.KEYS)
    assert constant["kLatent"] == mla_decode.LATENT and constant["kEntry"] * 2 == mla_decode.ENTRY_BYTES
    tiles = 3 * 64 * mla_decode.ENTRY_BYTES
    small = (64 + 2 * 2 * 64) * 4 + (2 * 5 + 2 * 2 + 2) * 8  # scales and sums; barriers
    assert 1024 + tiles + small <= mla_decode._SHARED_BYTES <= MOST_SHARED_BYTES
    for name, threads in (("mla_schedule", 256), ("mla_combine", 256)):
        assert f"constexpr int kThreads = {threads};" in jit.read_source(name)


@pytest.mark.parametrize(
    "heads, tokens, requests, ctas",
    [(128, 7, 7, 2), (64, 7, 7, 1), (64, 8, 7, 2), (16, 28, 7, 1), (32, 28, 7, 2), (128, 0, 1, 1)],
)
def test_two_thread_blocks_work_together_where_one_has_not_enough_rows(heads, tokens, requests, ctas):
    assert ctas_of(heads, tokens, requests) == ctas


def test_a_missing_compiler_is_an_import_error(monkeypatch):
    def no_kernel(*_):
        raise ImportError("no NVRTC here")

    monkeypatch.setattr(mla_decode, "_schedule", no_kernel)
    with pytest.raises(ImportError, match="no NVRTC"):
        mla_decode.load(0)


def test_no_tokens_need_no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: None)
    schedule = mla_decode.MlaSchedule(2, torch.zeros(67, 4, dtype=torch.int32))
    q, empty = torch.empty(0, 128, 576, dtype=torch.bfloat16), torch.empty(0, dtype=torch.int32)
    pages = torch.empty(1, 64, 576, dtype=torch.bfloat16)
    assert mla_decode.mla_decode(q, pages, empty.view(0, 1), empty, None, 1.0, schedule).shape == (0, 128, 512)
