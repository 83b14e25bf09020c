"""Attention of expanded prompts without a GPU: tiles, blocks, tails and turns, against the oracle in float64."""

import ctypes
import platform
import shutil
from types import SimpleNamespace

import pytest
import torch

from eprt.gpu import prompt_attention
from eprt.gpu.prompt_attention import PromptParams, source
from tests.emulated.kernels import library
from tests.gpu.draw import Draw, near
from tests.prompts import Prompts

pytestmark = pytest.mark.skipif(
    platform.machine() != "x86_64" or shutil.which("g++") is None, reason="needs g++ on x86-64"
)


class LaunchOnHost:
    def __init__(self):
        self.params, self.library = PromptParams(), library(source(), "eprt::prompt_attention")

    def __call__(self, num_blocks: int, stream: int) -> None:
        shared = prompt_attention._SHARED_BYTES + 1024
        self.library.launch(ctypes.byref(self.params), num_blocks, prompt_attention._THREADS, shared)


@pytest.fixture
def on_host(monkeypatch):
    launch, words = LaunchOnHost(), ctypes.c_uint64 * 16

    def tensor_map(address: int, rows: int, row_bytes: int, tiles: int, box_rows: int, box_tiles: int):
        assert box_rows == 128
        return words(address, rows, row_bytes, tiles, box_tiles)

    monkeypatch.setattr(prompt_attention, "strided_tiles", tensor_map)
    monkeypatch.setattr(prompt_attention, "partial_tiles", tensor_map)
    monkeypatch.setattr(prompt_attention, "_launch", lambda device: launch)
    properties = SimpleNamespace(multi_processor_count=3)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=0))


CASES = [
    ([1], [1], 1, 1),
    ([128], [128], 1, 1),
    ([300], [300], 2, 2),
    ([5, 0, 130, 64, 1], [140, 3, 130, 321, 128], 2, 1),
    ([2 if i == 35 else 0 for i in range(40)], [i % 5 if i != 35 else 130 for i in range(40)], 1, 7),
]


@pytest.mark.parametrize("tokens, length, heads, together", CASES)
def test_each_token_attends_to_what_is_in_front_of_it(on_host, tokens, length, heads, together):
    prompts = Prompts.draw(Draw("cpu", len(tokens) + heads), tokens, length, heads, sharpness=1.0 + 3.0 * (heads == 2))
    near(prompts.attend(together), prompts.oracle(), 5e-3, f"{tokens} of {length}")
