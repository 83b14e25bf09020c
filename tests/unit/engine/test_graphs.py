"""Which numbers of rows are recorded. Recorded steps themselves: tests/recorded.py."""

from types import SimpleNamespace
from typing import Any

from eprt.config import IndexerConfig
from eprt.engine.graphs import context_pages, graph_sizes


def test_graph_sizes_end_at_the_most_rows():
    assert graph_sizes((1, 2, 4, 8, 16), 12) == [1, 2, 4, 8, 12]
    assert graph_sizes((1, 2), 12) == [1, 2, 12]
    assert graph_sizes((), 12) == []


def config(indexer: IndexerConfig | None = None, v4: Any = None) -> Any:
    return SimpleNamespace(indexer=indexer, v4=v4)


def test_contexts_that_an_indexer_leaves_alone_have_graphs_of_their_own():
    assert context_pages(100, 16, config()) == [100]
    assert context_pages(100, 16, config(IndexerConfig(64, 128, 512))) == [32, 100]
    assert context_pages(32, 16, config(IndexerConfig(64, 128, 512))) == [32], "no context is longer"
    assert context_pages(100, 64, config(IndexerConfig(64, 128, 48))) == [100], "shorter than a page"


def test_an_indexer_of_entries_leaves_contexts_alone_that_have_as_many_of_four_tokens():
    v4 = SimpleNamespace(compress_ratios=(0, 4, 128), index_topk=512)
    assert context_pages(4096, 256, config(v4=v4)) == [8, 4096]
    assert context_pages(100, 256, config(v4=SimpleNamespace(compress_ratios=(0, 128), index_topk=512))) == [100]
