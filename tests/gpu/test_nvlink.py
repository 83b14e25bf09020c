"""The nvlink backend on real GPUs, 2 and 4 ranks, against the CPU oracle."""

import pytest

from tests.gpu.gpus import NUM_GPUS, run_case

CASES = "cases_nvlink"

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(NUM_GPUS < 2, reason="needs two NVIDIA GPUs with peer access")]


def run(num_ranks: int, case: str, **kwargs) -> str:
    return run_case(num_ranks, f"{CASES}:{case}", **kwargs)


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_random_shapes_match_the_oracle_bit_for_bit(num_ranks):
    run(num_ranks, "random_shapes", seed=num_ranks, cases_per_shape=4)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_two_handles_in_flight(num_ranks):
    run(num_ranks, "two_in_flight")


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_many_epochs_with_changing_shapes(num_ranks):
    run(num_ranks, "many_epochs", num_steps=10_000)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_graph_replay(num_ranks):
    run(num_ranks, "graph_replay")


@pytest.mark.parametrize("exact", [False, True])
def test_tiles_leave_as_their_signals_come(exact):
    run(2, "tile_signals", exact=exact)


def test_a_tile_that_never_comes_is_named():
    run(2, "missing_signal")


@pytest.mark.parametrize("num_ranks, victim", [(2, 1), (4, 0)])
def test_the_others_go_on_when_a_rank_is_killed(num_ranks, victim):
    assert f"rank {victim}" in run(num_ranks, "killed_rank", victim=victim, killed=(victim,))


def test_a_masked_rank_is_not_waited_for():
    run(2, "masked_before")


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_masked_rank_comes_back(num_ranks):
    run(num_ranks, "rank_returns")


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_statistics_against_the_truth_and_a_late_rank(num_ranks):
    run(num_ranks, "late_rank")


def test_bad_input_is_named():
    run(2, "bad_input")


def test_fp8_power_of_two_scales():
    run(2, "fp8_power_of_two_scales")
