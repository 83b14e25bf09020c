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


@pytest.mark.parametrize("requests", [1, 8])
@pytest.mark.parametrize("cached, fewest", [(0, 1), (512, 113), (2048, 178), (8192, 210), (100_000, 223), (None, 224)])
def test_expanding_pays_from_so_many_new_tokens_behind_cached_ones(requests, cached, fewest):
    def pays(new: int) -> bool:
        return mla_expanded.pays(requests * new, requests, None if cached is None else requests * (cached + new))

    assert [new for new in range(1, 400) if pays(new)] == list(range(fewest, 400))
