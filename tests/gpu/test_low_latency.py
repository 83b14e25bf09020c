"""The nvlink backend's low latency on real GPUs, against the CPU oracle."""

import pytest

from tests.gpu.gpus import LONG_EPOCHS, MOST_RANKS, at_ranks, run_case

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(MOST_RANKS < 2, reason="needs two NVIDIA GPUs with peer access")]


@pytest.mark.parametrize("num_ranks", at_ranks(2, 4, 8))
def test_low_latency(num_ranks):
    """Bit for bit over random shapes; handles in flight; epochs of changing shapes; graphs; signals; masks; a
    rank that returns; statistics against the truth and a late rank; bad input; power-of-two scales."""
    print(
        run_case(num_ranks, "cases_low_latency_one_launch:one_launch", seed=num_ranks, cases_per_shape=4, num_steps=500)
    )


@pytest.mark.long
@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_many_epochs_with_changing_shapes(num_ranks):
    run_case(num_ranks, "cases_low_latency:many_epochs", num_steps=LONG_EPOCHS)


@pytest.mark.one_gpu
def test_random_shapes_of_one_rank_match_the_oracle_bit_for_bit():
    run_case(1, "cases_low_latency:random_shapes", seed=1, cases_per_shape=4)


@pytest.mark.parametrize("num_ranks, victim", at_ranks((2, 1), (4, 0), (8, 5)))
def test_the_others_go_on_when_a_rank_is_killed(num_ranks, victim):
    printed = run_case(num_ranks, "cases_low_latency_lost_ranks:killed_rank", victim=victim, killed=(victim,))
    assert f"rank {victim}" in printed


@pytest.mark.parametrize("num_ranks", at_ranks(2, 4))
def test_to_mask_a_rank_ends_the_wait_of_a_kernel_for_it(num_ranks):
    run_case(num_ranks, "cases_low_latency_lost_ranks:masked_while_awaited")
