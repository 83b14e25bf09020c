"""Before the first request: every length of prompt is tried, halves too, so that nobody waits for a compiler later."""

import functools

import pytest
import torch

from eprt import LLM, EngineConfig, EPGroup
from eprt.engine import graphs
from eprt.engine.batch_rows import BatchRows
from eprt.engine.runner import Runner
from eprt.engine.warm_up import log_graphs, record_decodes, warm_up
from eprt.ep.config import EPConfig
from eprt.layers.layer_cache import LayerCache
from eprt.models.loader import load_model
from tests.paths import DEMO


def test_halves_are_tried_before_the_first_request(monkeypatch):
    model = load_model(EngineConfig(DEMO, overlap="tbo"), EPGroup.single())
    shape = model.config.num_hidden_layers, 3, 16, model.config.kv_dim
    cache_L = [LayerCache(latents_PSD) for latents_PSD in torch.zeros(shape, dtype=model.config.dtype)]
    seen = []
    forward = model.forward
    monkeypatch.setattr(model, "forward", lambda b, kv: (seen.append((b.num_tokens, b.overlap)), forward(b, kv)))
    runner = Runner(model, cache_L, BatchRows(1, 40, 16, model.config.vocab_size), 40)
    warm_up(runner, None, 40, lambda num_tokens: "tbo" if num_tokens >= 32 else "none")
    tried = [(length, "none") for length in (1, 16, 32, 40, 40)]
    assert sorted(seen) == sorted([*tried, (32, "tbo"), (40, "tbo"), (40, "tbo")])
    assert model.config.moe is not None
    for rows_S in model.expert_load():
        assert sum(rows > 0 for rows in rows_S) > 2 * model.config.moe.top_k, "or few ranks' experts would be tried"
        assert max(rows_S) >= 2 * 40, "as many as one can get"
    seen.clear()
    warm_up(runner, None, 300)
    assert sorted(seen) == [(length, "none") for length in (1, 16, 32, 64, 128, 256, 300, 300)]
    model.close()


@pytest.mark.parametrize("num_drafts", [0, 1])
def test_decodes_that_are_not_recorded_are_tried_before_serving(monkeypatch, num_drafts):
    """Kernels are compiled, and what cannot attend is told, before a rank waits for another."""
    with LLM(DEMO, EPGroup.single(), kv_cache_gb=0.01, num_speculative_tokens=num_drafts) as llm:
        runner, drafter, tried, guessed = llm.engine.runner, llm.engine.drafter, [], []
        compute = runner.compute
        monkeypatch.setattr(runner, "compute", lambda batch: (tried.append(batch), compute(batch))[1])
        if drafter is not None:
            monkeypatch.setattr(drafter, "compute", lambda batch, hidden_TH: guessed.append((batch, hidden_TH)))
        assert record_decodes(runner, drafter, (), 6, 2, "sbo") == []
        assert [batch.num_decode for batch in tried] == [1, 2, 4, 6]
        assert all((batch.mode, batch.overlap) == ("low_latency", "sbo") for batch in tried)
        assert len(guessed) == (4 if num_drafts else 0) and runner.graphs is None


def test_what_is_tried_waits_as_long_as_ranks_may_take_to_set_up_and_what_is_recorded_does_not(monkeypatch):
    """A rank that found its kernels compiled waited only 10 s in them for one that did not."""
    deadline_s, tried_s, recorded_s = {}, [], []

    def set_deadline(mode, timeout_s, named=""):
        deadline_s[mode] = timeout_s

    def compute(really, *batch):
        tried_s.append({*deadline_s.values()})
        return really(*batch)

    monkeypatch.setenv("EPRT_SET_UP_TIMEOUT_S", "1234")
    with LLM(DEMO, EPGroup.single(), kv_cache_gb=0.01, num_speculative_tokens=1) as llm:
        runner, drafter = llm.engine.runner, llm.engine.drafter
        assert drafter is not None and len(runner.model.exchange) == 2
        for mode, backend in runner.model.exchange.items():
            monkeypatch.setattr(backend, "set_deadline", functools.partial(set_deadline, mode))
        for part in (runner, drafter):
            monkeypatch.setattr(part, "compute", functools.partial(compute, part.compute))
        warm_up(runner, drafter, 40)
        record_decodes(runner, drafter, (), 6, 2, "none")
        assert tried_s == [{1234.0}] * 2 * (5 + 4) and {*deadline_s.values()} == {EPConfig(64, 4, 2, 4).timeout_s}
        tried_s.clear()
        monkeypatch.setattr(graphs, "record", lambda compute, pool: recorded_s.append({*deadline_s.values()}))
        monkeypatch.setattr(type(runner.model.exchange), "require_recordable", lambda exchange: None)
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
        assert record_decodes(runner, drafter, (1, 2), 6, 2, "none") == [1, 2, 6]
        assert tried_s == [{1234.0}] * 6 and recorded_s == [{30.0}] * 6, "each size of both is tried, then recorded"


def test_what_is_recorded_and_what_is_not_is_told(caplog):
    caplog.set_level("INFO")
    log_graphs([1, 8, 64], most_decodes=128, most_rows=64)
    log_graphs([1, 8], most_decodes=8, most_rows=64)
    log_graphs([], most_decodes=8, most_rows=64)
    first, more, second, third = (record.message for record in caplog.records)
    assert "CUDA graphs of 1, 8, 64 rows" in first and "1, 8 rows" in second and "launched anew" in third
    assert "128 rows" in more and "--low-latency-max-tokens 64" in more
