"""DeepEP's interface on real GPUs, low latency and normal mode, against an oracle."""

import pytest

from tests.gpu.gpus import MOST_RANKS, at_ranks, run_case

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(MOST_RANKS < 2, reason="needs two NVIDIA GPUs with peer access")]


@pytest.mark.parametrize("num_ranks", at_ranks(2, 4, 8))
def test_low_latency(num_ranks):
    """All ways to call; hooks in flight; graphs; scale formats; statistics; bad input; overlap; a rank that returns."""
    print(run_case(num_ranks, "cases_deep_ep_low_latency_one_launch:one_launch", seed=num_ranks, cases_per_shape=6))


@pytest.mark.long
@pytest.mark.parametrize(
    "num_ranks, victim, before", [(2, 1, "dispatch"), (4, 0, "dispatch"), (4, 2, "combine"), (8, 5, "combine")]
)
def test_the_others_go_on_when_a_rank_is_killed(num_ranks, victim, before):
    case = "cases_deep_ep_low_latency_lost_ranks:killed_rank"
    assert "went on after" in run_case(num_ranks, case, victim=victim, before=before, killed=(victim,))


@pytest.mark.parametrize("num_ranks", at_ranks(2, 4, 8))
def test_normal_mode(num_ranks):
    """Against the oracle; memory that runs low; memory that another stream still reads."""
    run_case(num_ranks, "cases_deep_ep_normal:one_launch", seed=num_ranks, cases_per_shape=6)
