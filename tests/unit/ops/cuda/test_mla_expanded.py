"""Which kernel attends prompts on GPUs, without a GPU."""

import logging

import pytest
import torch

pytest.importorskip("triton")
from eprt.ops.cuda import expanded_eprt, expanded_triton, mla_expanded


@pytest.fixture(autouse=True)
def nothing_was_logged():
    mla_expanded._log_choice.cache_clear()
    yield
    mla_expanded._log_choice.cache_clear()


@pytest.mark.parametrize(
    "wanted, refusal, module, log",
    [
        ("auto", None, expanded_eprt, "prompts are attended by eprt"),
        ("eprt", None, expanded_eprt, "prompts are attended by eprt"),
        ("flashmla", None, expanded_eprt, "prompts are attended by eprt"),
        ("auto", "it is small", expanded_triton, "prompts are attended by triton; it is small"),
        ("triton", None, expanded_triton, "prompts are attended by triton"),
    ],
)
def test_eprt_comes_first_where_it_can(monkeypatch, caplog, wanted, refusal, module, log):
    monkeypatch.setenv("EPRT_GPU_ATTENTION", wanted)
    monkeypatch.setattr(expanded_eprt, "refusal", lambda *inputs: refusal)
    x = torch.empty(1, 1, 1)
    with caplog.at_level(logging.INFO):
        assert [mla_expanded.kernel(x, x, x) for _ in range(2)] == [module] * 2
    assert [record.getMessage() for record in caplog.records] == [log]


@pytest.mark.parametrize(
    "tokens, requests, expanded", [(191, 1, False), (192, 1, True), (383, 2, False), (384, 2, True)]
)
def test_expanding_pays_from_so_many_tokens_of_a_request(tokens, requests, expanded):
    assert mla_expanded.pays(tokens, requests) == expanded
