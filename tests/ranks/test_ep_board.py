"""StepBoard over real processes: every number of ranks, real and virtual nodes."""

import pytest

from tests.ranks.launch import run_ranks


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 7])
def test_one_node(num_ranks):
    run_ranks(num_ranks, "tests.ranks.cases_ep_board:all", num_nodes=1)


@pytest.mark.parametrize("num_ranks, ranks_per_node, num_nodes", [(4, 2, 2), (7, 3, 3), (3, 1, 3)])
def test_virtual_nodes(num_ranks, ranks_per_node, num_nodes):
    run_ranks(
        num_ranks,
        "tests.ranks.cases_ep_board:all",
        num_nodes=num_nodes,
        extra_env={"EPRT_RANKS_PER_NODE": str(ranks_per_node)},
    )
