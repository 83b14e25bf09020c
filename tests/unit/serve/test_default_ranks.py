"""How many ranks a server has where nobody says."""

import pytest

from eprt.serve.default_ranks import default_ranks
from tests.unit.cases import made_up_machine


@pytest.mark.parametrize(("nodes", "ranks"), [(1, 1), (2, 2), (3, 2), (4, 4), (6, 4), (8, 8)])
def test_one_for_each_numa_node(nodes, ranks):
    """As many as divide the experts, however many cores a node has."""
    for cores in (1, 2, 64):
        assert default_ranks(made_up_machine(nodes, cores)) == ranks


@pytest.mark.parametrize(("quota", "ranks"), [(0.5, 1), (1.5, 1), (2.0, 2), (3.9, 2), (4.0, 4), (64.0, 4)])
def test_no_more_than_the_container_has_time_for(quota, ranks):
    assert default_ranks(made_up_machine(4, 8, quota=quota)) == ranks


def test_of_this_machine():
    assert default_ranks() >= 1
