"""Who forwards what between nodes, and how hosts become nodes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eprt.ep.cpu.topology import Topology
from eprt.ep.group.group import nodes_of_hosts

hosts = st.lists(st.integers(0, 4), min_size=1, max_size=16)


def test_virtual_nodes_are_neighbours_of_one_host():
    assert nodes_of_hosts(["a"] * 7, None) == (0,) * 7
    assert nodes_of_hosts(["a"] * 7, 2) == (0, 0, 1, 1, 2, 2, 3)
    assert nodes_of_hosts(["a"] * 7, 3) == (0, 0, 0, 1, 1, 1, 2)
    assert nodes_of_hosts(["a", "b", "a", "b", "a"], None) == (0, 1, 0, 1, 0)
    assert nodes_of_hosts(["a", "b", "a", "b", "a"], 2) == (0, 1, 0, 1, 2)


@given(hosts, st.one_of(st.none(), st.integers(1, 5)))
def test_nodes_never_span_hosts_and_are_numbered_by_first_appearance(host_of_rank, ranks_per_node):
    nodes = nodes_of_hosts(host_of_rank, ranks_per_node)
    assert list(dict.fromkeys(nodes)) == list(range(max(nodes) + 1))
    for node in set(nodes):
        members = [host for host, its_node in zip(host_of_rank, nodes) if its_node == node]
        assert len(set(members)) == 1
        assert ranks_per_node is None or len(members) <= ranks_per_node


@given(hosts, st.data())
def test_every_source_has_one_home_in_every_node(host_of_rank, data):
    nodes = nodes_of_hosts(host_of_rank, None)
    rank = data.draw(st.integers(0, len(nodes) - 1))
    topology = Topology(rank, nodes)
    local_ranks = topology.ranks_of(topology.node)
    homes = [topology.home(source) for source in range(len(nodes))]
    assert len(set(homes)) == len(nodes), "two sources share a block"
    for source, (segment, block) in enumerate(homes):
        holder = local_ranks[segment]
        if nodes[source] == topology.node:
            assert (holder, block) == (source, 0)
        else:
            assert holder == topology.proxy(source, topology.node)
            assert topology.proxied_by(holder)[block - 1] == source


@given(hosts)
def test_proxies_share_the_work(host_of_rank):
    """For each pair of nodes the numbers of sources per proxy differ by at most one."""
    nodes = nodes_of_hosts(host_of_rank, None)
    topology = Topology(0, nodes)
    for node in range(topology.num_nodes):
        for other in set(range(topology.num_nodes)) - {node}:
            proxied = [topology.proxy(source, node) for source in topology.ranks_of(other)]
            counts = [proxied.count(rank) for rank in topology.ranks_of(node)]
            assert max(counts) - min(counts) <= 1


@pytest.mark.parametrize(
    "ranks_per_node, expected", [(2, {0: (2, 4, 6), 1: (3, 5)}), (3, {0: (3, 6), 1: (4,), 2: (5,)})]
)
def test_unequal_nodes(ranks_per_node, expected):
    topology = Topology(0, nodes_of_hosts(["a"] * 7, ranks_per_node))
    assert {rank: topology.proxied_by(rank) for rank in expected} == expected
