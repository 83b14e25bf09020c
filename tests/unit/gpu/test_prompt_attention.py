"""The attention of prompts without a GPU: its kernel compiles, and Python and CUDA mean the same.

What it computes is checked in tests/emulated/test_prompt_attention.py and tests/gpu/cases_prompt_attention.py."""

import ctypes
import re

import pytest
import torch

from eprt.ep.nvlink import prebuild
from eprt.gpu import jit, prompt_attention
from eprt.gpu.prompt_attention import PromptParams
from tests.unit.gpu.test_jit import cache, nvrtc, struct_fields  # noqa: F401 (fixtures)


def test_the_kernel_compiles_for_hopper_and_is_built_ahead(nvrtc, cache):  # noqa: F811
    source = prompt_attention.source()
    assert jit.cubin(source).startswith(b"\x7fELF")
    assert source in [one for _, one in prebuild.sources("sm_90a")]
    assert source not in [one for _, one in prebuild.sources("sm_80")]


def test_python_and_cuda_agree_on_parameters():
    fields = [name for name, _ in PromptParams._fields_]
    assert struct_fields(jit.read_source("prompt_attention"), "PromptParams") == fields
    assert ctypes.sizeof(PromptParams) % 64 == 0 and PromptParams.query_start.offset == 4 * 128


def test_python_and_cuda_agree_on_sizes():
    text = jit.read_source("prompt_attention")
    constant = {name: int(value) for name, value in re.findall(r"(k\w+) = (\d+)\b", text)}
    assert (constant["kRows"], constant["kKeys"]) == (prompt_attention.ROWS, prompt_attention.KEYS)
    assert constant["kScores"] * 64 == prompt_attention.NOPE + prompt_attention.ROPE
    assert constant["kValue"] * 64 == prompt_attention.VALUE and constant["kStages"] == prompt_attention._STAGES
    tiles = (constant["kScores"] * (1 + constant["kStages"]) + constant["kValue"] * constant["kStages"]) * 128 * 128
    small = 6 * 4 + (2 + 4 * constant["kStages"]) * 8  # the tile, barriers
    assert 1024 + tiles + small <= prompt_attention._SHARED_BYTES <= 227 << 10


def test_a_missing_compiler_is_named(monkeypatch):
    def no_kernel(*_):
        raise ImportError("compiling CUDA kernels needs NVRTC")

    monkeypatch.setattr(prompt_attention, "_launch", no_kernel)
    with pytest.raises(ImportError, match="NVRTC"):
        prompt_attention.load(0)


def test_no_tokens_launch_nothing(monkeypatch):
    monkeypatch.setattr(prompt_attention, "_launch", None)
    q, r, out = (torch.empty(0, 4, size, dtype=torch.bfloat16) for size in (128, 64, 128))
    kv, rope = torch.empty(5, 4, 256, dtype=torch.bfloat16), torch.empty(5, 64, dtype=torch.bfloat16)
    length, start = torch.tensor([5], dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    prompt_attention.prompt_attention(q, r, kv, rope, length, start, 1.0, out)
