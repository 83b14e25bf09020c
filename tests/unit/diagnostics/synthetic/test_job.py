"""A synthetic job's nodes, and when its faults are on."""

import pytest
from eprt.diagnostics.synthetic import PlantedFault, SyntheticJob


def test_ranks_fill_their_nodes_one_after_the_other():
    assert SyntheticJob(5, ranks_per_node=2).node_of_rank_N.tolist() == [0, 0, 1, 1, 2]
    assert SyntheticJob(3).node_of_rank_N.tolist() == [0, 0, 0]


@pytest.mark.parametrize(("windows", "expected"), [(None, [0, 1, 2, 3]), ((1, 2), [1, 2]), ((3, 3), [3])])
def test_a_fault_is_on_from_its_first_to_its_last_window(windows, expected):
    job = SyntheticJob(num_windows=4)
    assert list(range(4))[job.windows_of(PlantedFault("column", rank=0, windows=windows))] == expected
