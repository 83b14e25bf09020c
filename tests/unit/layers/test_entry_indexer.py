"""EntryIndexer: the best entries by the formula, from pages; ties go to the lower position, in any batch."""

from types import SimpleNamespace
from typing import Any

import torch

from eprt.layers.entry_indexer import EntryIndexer, IndexQueries

PAGE = 8  # entries


def indexer(top_k: int) -> EntryIndexer:
    v4 = SimpleNamespace(index_n_heads=2, index_head_dim=4, index_topk=top_k)
    config: Any = SimpleNamespace(v4=v4)
    nothing: Any = None
    return EntryIndexer(config, nothing, nothing)


def queries(num: int, seed: int = 0) -> IndexQueries:
    generator = torch.Generator().manual_seed(seed)
    return IndexQueries(torch.randn(num, 2, 4, generator=generator), torch.randn(num, 2, generator=generator))


def test_the_best_visible_entries_are_chosen_and_ties_go_to_the_lower_position():
    part, keys = queries(40), torch.randn(32, 4, generator=torch.Generator().manual_seed(1))
    keys[5:9] = keys[4]  # and many scores are 0: relu of negative products
    table = torch.tensor([[5, 0, 3, 1]])
    pages = torch.full((6, PAGE, 4), torch.nan)
    pages[table[0]] = keys.unflatten(0, (4, PAGE))
    visible, request = torch.arange(40).clamp(max=30).int(), torch.zeros(40, dtype=torch.int32)
    got = indexer(6).choose(part, pages, table, request, visible)
    for t, row in enumerate(got.tolist()):
        scores = (part.weight_TJ[t][:, None] * torch.relu(part.query_TJI[t] @ keys.T)).sum(0).tolist()
        best = sorted(sorted(range(int(visible[t])), key=lambda i: (-scores[i], i))[:6])
        assert row == [int(table[0, i // PAGE]) * PAGE + i % PAGE for i in best] + [-1] * (6 - len(best))
        one = IndexQueries(part.query_TJI[t : t + 1], part.weight_TJ[t : t + 1])
        alone = indexer(6).choose(one, pages, table, request[:1], visible[t : t + 1])
        assert alone[0].tolist() == row
