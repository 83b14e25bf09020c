"""Before the first request: every length of prompt is tried, halves too, so that nobody waits for a compiler later."""

import pytest
import torch

from eprt import LLM, EngineConfig, EPGroup
from eprt.engine.batch_rows import BatchRows
from eprt.engine.runner import Runner
from eprt.engine.warm_up import log_graphs, record_decodes, warm_up
from eprt.layers.layer_cache import LayerCache
from eprt.models.loader import load_model
from tests.paths import DEMO


def test_halves_are_tried_before_the_first_request(monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
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


def test_what_is_recorded_and_what_is_not_is_told(caplog):
    caplog.set_level("INFO")
    log_graphs([1, 8, 64], most_decodes=128, most_rows=64)
    log_graphs([1, 8], most_decodes=8, most_rows=64)
    log_graphs([], most_decodes=8, most_rows=64)
    first, more, second, third = (record.message for record in caplog.records)
    assert "CUDA graphs of 1, 8, 64 rows" in first and "1, 8 rows" in second and "launched anew" in third
    assert "128 rows" in more and "--low-latency-max-tokens 64" in more
