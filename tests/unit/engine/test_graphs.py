"""Which numbers of rows are recorded. Recorded steps themselves: tests/recorded.py."""

from eprt.engine.graphs import graph_sizes


def test_graph_sizes_end_at_the_most_rows():
    assert graph_sizes((1, 2, 4, 8, 16), 12) == [1, 2, 4, 8, 12]
    assert graph_sizes((1, 2), 12) == [1, 2, 12]
    assert graph_sizes((), 12) == []
