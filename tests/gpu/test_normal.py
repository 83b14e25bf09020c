"""Normal mode between real GPUs, by expert and as per-token rows, against an oracle."""

import pytest

from tests.gpu.gpus import LONG_EPOCHS, MOST_RANKS, at_ranks, not_shared, run_case

CASES = "cases_normal"
EPOCHS = (300, pytest.param(LONG_EPOCHS, marks=pytest.mark.long))

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(MOST_RANKS < 2, reason="needs two NVIDIA GPUs with peer access")]


def run(num_ranks: int, case: str, **kwargs) -> str:
    return run_case(num_ranks, f"{CASES}:{case}", **kwargs)


@pytest.mark.parametrize("num_ranks", at_ranks(1, 2, 4, 8))
def test_corner_shapes_match_the_oracle_bit_for_bit(num_ranks):
    run(num_ranks, "corner_shapes", seed=num_ranks, cases_per_shape=7)


@pytest.mark.long
@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_random_shapes_match_the_oracle_bit_for_bit(num_ranks):
    run(num_ranks, "random_shapes", seed=num_ranks, num_shapes=20)


@pytest.mark.parametrize("num_ranks", at_ranks(1, 2, 4, 8))
def test_rows_per_token_match_the_oracle_bit_for_bit(num_ranks):
    run_case(num_ranks, "cases_normal_rows:token_rows", seed=num_ranks, cases_per_shape=7)


@pytest.mark.parametrize("num_ranks", at_ranks(2, 4))
def test_two_handles_in_flight(num_ranks):
    run(num_ranks, "two_in_flight")


@pytest.mark.parametrize("num_steps", EPOCHS)
@pytest.mark.parametrize("num_ranks", at_ranks(2, 4))
def test_many_epochs_with_changing_shapes(num_ranks, num_steps):
    run(num_ranks, "many_epochs", num_steps=num_steps)


@pytest.mark.parametrize("num_steps", EPOCHS)
@pytest.mark.parametrize("num_ranks", at_ranks(1, 2, 4))
def test_many_epochs_of_rows_each_of_another_shape(num_ranks, num_steps):
    run_case(num_ranks, "cases_normal_rows:many_row_epochs", num_steps=num_steps)


@pytest.mark.parametrize("num_ranks", at_ranks(2, 4))
def test_graph_replay(num_ranks):
    run(num_ranks, "graph_replay")


@pytest.mark.long
@pytest.mark.parametrize("num_ranks, victim", [(2, 1), (4, 0), (8, 5)])
def test_the_others_go_on_when_a_rank_is_killed(num_ranks, victim):
    case = "cases_normal_lost_ranks:killed_rank"
    assert f"rank {victim}" in run_case(num_ranks, case, victim=victim, killed=(victim,))


def test_bad_input_is_named():
    run(2, "bad_input")


def test_more_rows_than_a_static_bound_are_left_out_and_named():
    for exact in (False, True):
        run_case(2, "cases_static_bound:too_many_rows", exact=exact)
    run_case(2, "cases_static_bound:too_many_items")


@pytest.mark.long
@not_shared("each waits for whoever has the GPU")
def test_a_late_rank_shows_in_the_statistics():
    run_case(2, "cases_normal_lost_ranks:late_rank")
