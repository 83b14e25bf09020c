"""Before the first request: every length of prompt is tried, halves too, so that nobody waits for a compiler later."""

import torch

from eprt import EngineConfig, EPGroup
from eprt.engine.batch_rows import BatchRows
from eprt.engine.runner import Runner
from eprt.engine.warm_up import warm_up
from eprt.models.loader import load_model
from tests.paths import DEMO


def test_halves_are_tried_before_the_first_request(monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    model = load_model(EngineConfig(DEMO, overlap="tbo"), EPGroup.single())
    cache = torch.zeros(model.config.num_hidden_layers, 3, 16, model.config.kv_dim, dtype=model.config.dtype)
    seen = []
    forward = model.forward
    monkeypatch.setattr(model, "forward", lambda b, kv: (seen.append((b.num_tokens, b.overlap)), forward(b, kv)))
    runner = Runner(model, cache, BatchRows(1, 40, 16, model.config.vocab_size), 40)
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
