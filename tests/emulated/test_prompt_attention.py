"""Attention of expanded prompts without a GPU: tiles, blocks, tails and turns, against the oracle in float64."""

import ctypes
import platform
import shutil
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from eprt.gpu import prompt_attention
from eprt.gpu.prompt_attention import NOPE, ROPE, VALUE, PromptParams, source
from tests.emulated.kernels import library

pytestmark = pytest.mark.skipif(
    platform.machine() != "x86_64" or shutil.which("g++") is None, reason="needs g++ on x86-64"
)
SCALE = 0.11


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


def oracle(q_TNC: Tensor, kv_SNE: Tensor, rope_SR: Tensor, length: list[int], tokens: list[int]) -> Tensor:
    """[T, N, VALUE] float64. q_TNC: with the rotated part."""
    heads = kv_SNE.shape[1]
    k_SND = torch.cat((kv_SNE[..., :NOPE], rope_SR[:, None].expand(-1, heads, -1)), -1).double()
    v_SNV, outs, first, begin = kv_SNE[..., NOPE:].double(), [], 0, 0
    for new, known in zip(tokens, length):
        k, v, q = k_SND[begin : begin + known], v_SNV[begin : begin + known], q_TNC[first : first + new].double()
        score = torch.einsum("tnd,snd->nts", q, k) * SCALE
        hidden = torch.arange(known) > torch.arange(known - new, known)[:, None]
        outs.append(torch.einsum("nts,snv->tnv", score.masked_fill(hidden, -torch.inf).softmax(-1), v))
        first, begin = first + new, begin + known
    return torch.cat(outs)


CASES = [
    ([1], [1], 1, 1),
    ([128], [128], 1, 1),
    ([300], [300], 2, 2),
    ([5, 0, 130, 64, 1], [140, 3, 130, 321, 128], 2, 1),
    ([2 if i == 35 else 0 for i in range(40)], [i % 5 if i != 35 else 130 for i in range(40)], 1, 7),
]


@pytest.mark.parametrize("tokens, length, heads, together", CASES)
def test_each_token_attends_to_what_is_in_front_of_it(on_host, tokens, length, heads, together):
    """Memory that belongs to no request holds NaN; rows past the last token stay as they were."""
    draw, num_tokens, positions = torch.Generator().manual_seed(len(tokens) + heads), sum(tokens), sum(length)

    def normal(rows: int, *shape: int) -> Tensor:
        x = torch.full((rows + 70, *shape), torch.nan, dtype=torch.bfloat16)
        x[:rows] = torch.randn(rows, *shape, generator=draw).bfloat16()
        return x

    q_TNC, kv_SNE, rope_SR = (
        normal(num_tokens, heads, NOPE + ROPE),
        normal(positions, heads, NOPE + VALUE),
        normal(positions, ROPE),
    )
    q_rope_TNR = q_TNC[:num_tokens, :, NOPE:].contiguous()
    out = torch.full((num_tokens + 3, heads, VALUE), 99.0, dtype=torch.bfloat16)
    start = torch.tensor([0, *tokens]).cumsum(0).int()
    where = torch.tensor(length, dtype=torch.int32), start, SCALE, out[:num_tokens]
    prompt_attention.prompt_attention(q_TNC[:num_tokens, :, :NOPE], q_rope_TNR, kv_SNE, rope_SR, *where, together)
    want = oracle(q_TNC[:num_tokens], kv_SNE[:positions], rope_SR[:positions], length, tokens)
    assert (out[:num_tokens].double() - want).norm() <= 5e-3 * want.norm()
    assert (out[num_tokens:] == 99).all()
