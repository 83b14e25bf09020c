"""The cpu backend over real processes, on real and virtual nodes, against the oracle."""

import pytest

from tests.ranks.launch import run_ranks

CASES = "tests.ranks.cases_ep"


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 7])
def test_one_node(num_ranks):
    run_ranks(num_ranks, f"{CASES}:random_cases", seed=num_ranks, num_configs=24, num_nodes=1)


@pytest.mark.parametrize("num_ranks, ranks_per_node, num_nodes", [(4, 2, 2), (7, 3, 3), (7, 2, 4), (3, 1, 3)])
def test_virtual_nodes(num_ranks, ranks_per_node, num_nodes):
    run_ranks(
        num_ranks,
        f"{CASES}:random_cases",
        seed=10 * num_ranks + ranks_per_node,
        num_configs=16,
        num_nodes=num_nodes,
        extra_env={"EPRT_RANKS_PER_NODE": str(ranks_per_node)},
    )
