"""How the benchmark recognises the same tokens in two exchanges' groups."""

import pytest
import torch

pytest.importorskip("triton")

from benchmarks.ep.by_expert import page_table, plain, tag_of, tagged
from eprt.ep.reference import quantize


@pytest.mark.parametrize("rank", [0, 1, 7])
def test_a_tag_survives_both_payloads(rank):
    x = tagged(torch.randn(300, 256).bfloat16(), rank)
    want = torch.arange(300) + (rank << 18)
    assert torch.equal(tag_of(plain(x, None)), want)
    assert torch.equal(tag_of(plain(*quantize(x))), want)


def test_tokens_keep_their_other_columns():
    x = torch.randn(5, 256).bfloat16()
    assert torch.equal(tagged(x, 3)[:, 7:], x[:, 7:])
    assert x[0, 0] != 448, "the tokens themselves are not changed"


def test_the_page_has_a_row_per_call():
    times = {"eprt_us": 300.4, "deep_ep_us": 400.0, "to_deep_ep": 0.75, "deep_ep_permute_us": 500.0}
    row = {"tokens": 512, "call": "combine bf16", "after": "fp8", "to_deep_ep_permute": 0.6, **times}
    lines = page_table({"rows": [row, {**row, "call": "dispatch fp8"}]}).splitlines()
    assert lines[2:] == [
        "| 512 | combine bf16, after fp8 | 300 | 400, 0.75 | 500, 0.60 |",
        "| 512 | dispatch fp8 | 300 | 400, 0.75 | 500, 0.60 |",
    ]
