"""Which numbers of rows are recorded. Recorded steps themselves: tests/recorded.py."""

from eprt.config import IndexerConfig
from eprt.engine.graphs import context_pages, graph_sizes


def test_graph_sizes_end_at_the_most_rows():
    assert graph_sizes((1, 2, 4, 8, 16), 12) == [1, 2, 4, 8, 12]
    assert graph_sizes((1, 2), 12) == [1, 2, 12]
    assert graph_sizes((), 12) == []


def test_contexts_that_an_indexer_leaves_alone_have_graphs_of_their_own():
    assert context_pages(100, 16, None) == [100]
    assert context_pages(100, 16, IndexerConfig(64, 128, 512)) == [32, 100]
    assert context_pages(32, 16, IndexerConfig(64, 128, 512)) == [32], "no context is longer"
    assert context_pages(100, 64, IndexerConfig(64, 128, 48)) == [100], "shorter than a page"
