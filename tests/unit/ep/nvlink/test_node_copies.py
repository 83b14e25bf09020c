"""Copies by rank or by node: the choice agrees with the planner's model."""

from dataclasses import replace

import pytest

from eprt.cluster import exchange_time
from eprt.cluster.crossings import ExpertChoice, parts_elsewhere
from eprt.ep.nvlink import node_copies
from eprt.ep.nvlink.low_latency_layout import LowLatencyHeap
from eprt.ep.nvlink.options import NvlinkOptions


def heap(num_nodes: int, node_ranks: int, tokens: int = 128, top_k: int = 8) -> LowLatencyHeap:
    num_ranks = num_nodes * node_ranks
    return LowLatencyHeap(
        num_ranks, tokens, 7168, top_k, 256 // num_ranks, "fp8", False, 2, node_ranks=node_ranks, layered=False
    )


def test_figures_are_the_planners():
    legs = exchange_time._DISPATCH.GBps, exchange_time._COMBINE.GBps
    assert (node_copies._DISPATCH_GBps, node_copies._COMBINE_GBps) == legs
    assert node_copies._HAND_ON_US == exchange_time._FORWARD_US


@pytest.mark.parametrize("num_nodes, node_ranks", [(2, 8), (4, 8), (4, 4), (16, 2), (32, 1), (2, 1)])
def test_copies_are_counted_as_the_planner_does(num_nodes, node_ranks):
    gate, num_ranks = ExpertChoice(256, 8), num_nodes * node_ranks
    assert node_copies.parts_elsewhere(256, 8, num_nodes) == pytest.approx(parts_elsewhere(gate, num_nodes))
    beyond = parts_elsewhere(gate, num_ranks) * (num_ranks - node_ranks) / (num_ranks - 1)
    assert node_copies.ranks_elsewhere(256, 8, num_ranks, num_nodes) == pytest.approx(beyond)


def test_one_copy_for_each_node_where_it_saves_more_than_handing_on_costs():
    assert node_copies.node_copies_are_faster(heap(2, 8))
    assert node_copies.node_copies_are_faster(heap(4, 8))
    assert not node_copies.node_copies_are_faster(heap(2, 8, tokens=4))
    assert not node_copies.node_copies_are_faster(heap(16, 2, tokens=32))  # a token seldom goes to both ranks of a node
    assert not node_copies.node_copies_are_faster(heap(4, 8, top_k=1))


def test_nothing_is_handed_on_where_nodes_have_one_rank():
    assert not node_copies.node_copies_are_faster(heap(8, 1))


def test_options_name_the_ways():
    assert NvlinkOptions(copies="node").copies == "node"
    with pytest.raises(ValueError, match=r"NvlinkOptions\.copies='nodes': must be one of auto, rank, node"):
        NvlinkOptions(copies="nodes")


def test_the_documented_heap():
    two_nodes = heap(2, 8)
    sizes = [replace(two_nodes, layered=layered).num_bytes / 1e9 for layered in (True, False)]
    assert [f"{size:.1f} GB" for size in sizes] == ["1.3 GB", "0.3 GB"]
