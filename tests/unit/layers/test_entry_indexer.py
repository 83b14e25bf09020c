"""EntryIndexer: the best entries by the formula; ties go to the lower position, in any piece."""

from types import SimpleNamespace
from typing import Any

import torch

from eprt.layers import entry_indexer
from eprt.layers.entry_indexer import EntryIndexer, IndexQueries


def indexer(top_k: int) -> EntryIndexer:
    v4 = SimpleNamespace(index_n_heads=2, index_head_dim=4, index_topk=top_k)
    config: Any = SimpleNamespace(v4=v4)
    nothing: Any = None
    return EntryIndexer(config, nothing, nothing, nothing)


def queries(num: int, seed: int = 0) -> IndexQueries:
    generator = torch.Generator().manual_seed(seed)
    return IndexQueries(torch.randn(num, 2, 4, generator=generator), torch.randn(num, 2, generator=generator))


def test_the_best_visible_entries_are_chosen_and_ties_go_to_the_lower_position(monkeypatch):
    part, keys = queries(40), torch.randn(30, 4, generator=torch.Generator().manual_seed(1))
    keys[5:9] = keys[4]  # and many scores are 0: relu of negative products
    visible = torch.arange(40).clamp(max=30)
    got = indexer(6).choose(part, keys, visible)
    monkeypatch.setattr(entry_indexer, "_SCORES_AT_ONCE", 200)
    assert torch.equal(indexer(6).choose(part, keys, visible), got)
    for t, row in enumerate(got.tolist()):
        scores = (part.weight_TJ[t][:, None] * torch.relu(part.query_TJI[t] @ keys.T)).sum(0).tolist()
        want = sorted(range(int(visible[t])), key=lambda i: (-scores[i], i))[:6]
        assert row == want + [-1] * (6 - len(want))


def test_no_more_than_there_are():
    assert indexer(6).choose(queries(2), torch.randn(3, 4), torch.tensor([3, 1])).shape == (2, 3)
