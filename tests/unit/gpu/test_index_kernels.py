"""The indexer's kernels for Hopper without a GPU: they compile, and Python and CUDA mean the same.

They are run in tests/emulated, and in tests/gpu/cases_indexer.py."""

import ctypes

import pytest
import torch

pytest.importorskip("triton")
from eprt.ep.nvlink import prebuild
from eprt.gpu import index_choose, index_scores, jit
from eprt.ops.cuda import choose_eprt, choose_triton, indexer, scores_eprt, scores_triton
from eprt.ops.index_format import IndexFormat
from tests.unit.gpu.test_jit import cache, nvrtc, struct_fields  # noqa: F401 (fixtures)

MOST_SHARED_BYTES = 227 << 10


def test_kernels_compile_for_hopper_and_are_built_ahead(nvrtc, cache):  # noqa: F811
    ours = [
        *map(index_scores.source, index_scores.QUERIES),
        index_choose.source(2, 8192),
        index_choose.source(1, 32768),
    ]
    for source in ours:
        assert jit.cubin(source).startswith(b"\x7fELF")
    ahead = [source for _, source in prebuild.sources("sm_90a")]
    assert all(source in ahead for source in ours)
    assert not any(source.name.startswith("index_") for _, source in prebuild.sources("sm_80"))


def test_python_and_cuda_agree_on_parameters_and_sizes():
    choose, scores = index_choose.IndexChooseParams, index_scores.IndexScoresParams
    for name, struct in (("index_choose", choose), ("index_scores", scores)):
        fields = [field[0] for field in struct._fields_ if field[0] != "_"]
        assert struct_fields(jit.read_source(name), struct.__name__) == fields
    assert ctypes.sizeof(scores) % 64 == 0 and scores.query.offset == 0
    text = jit.read_source("index_choose")
    assert f"constexpr int kRoom = {index_choose.ROOM};" in text and "constexpr int kDigitBits = 12;" in text
    text = jit.read_source("index_scores")
    assert f"kStages = {index_scores._STAGES};" in text and "kGroups = 3;" in text
    assert IndexFormat(index_scores.SIZE, torch.uint8).width == index_scores.KEY_BYTES
    assert max(index_choose.shared_bytes(ctas, 32768) for ctas in index_choose.CTAS) <= MOST_SHARED_BYTES
    assert max(map(index_scores.shared_bytes, index_scores.QUERIES)) <= MOST_SHARED_BYTES


@pytest.mark.parametrize("rows, ctas", [(1, 8), (16, 8), (17, 4), (64, 2), (66, 2), (67, 1), (4096, 1)])
def test_a_row_has_as_many_thread_blocks_as_run_at_once(rows, ctas):
    assert index_choose.ctas_of(rows, 132) == ctas


def test_what_a_kernel_does_not_take_is_left_to_triton(monkeypatch):
    query, keys = torch.empty(3, 64, 128, dtype=torch.bfloat16), torch.empty(5, 64, 132, dtype=torch.uint8)
    for wanted in ("auto", "eprt", "triton"):
        monkeypatch.setenv("EPRT_GPU_INDEXER", wanted)
        monkeypatch.setattr(scores_eprt, "is_installed", lambda: True)
        monkeypatch.setattr(choose_eprt, "is_installed", lambda: True)
        assert indexer._first("scores", query, keys) is scores_triton
        assert indexer._first("choose", torch.empty(3, 320), 8) is choose_triton
    assert "and torch.float32" in str(scores_eprt.refusal(query.float(), keys))
    assert "not (32, 128)" in str(scores_eprt.refusal(query[:, :32], keys))
    assert "multiple of 16" in str(scores_eprt.refusal(query, keys[:, :8]))
    assert "at most 1048576 tokens, not 2097152" in str(choose_eprt.refusal(torch.empty(1, 1).expand(3, 1 << 21), 8))
    assert "at most 8192 tokens, not 9000" in str(choose_eprt.refusal(torch.empty(3, 320), 9000))
    monkeypatch.setenv("EPRT_GPU_INDEXER", "eprt")
    monkeypatch.setattr(scores_eprt, "is_installed", lambda: False)
    with pytest.raises(ImportError, match=r"EPRT_GPU_INDEXER=eprt: it is not installed; pip install 'eprt\[cuda13\]'"):
        indexer._first("scores", query, keys)
