"""A GPU that is late: the others' statistics charge it alone, and wait for it longer while all set up."""

import pytest

from tests.gpu.gpus import MOST_RANKS, at_ranks, not_shared, run_case

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(MOST_RANKS < 2, reason="needs two NVIDIA GPUs with peer access")]


@not_shared("each waits for whoever has the GPU")
@pytest.mark.parametrize("num_ranks", at_ranks(2, 4, 8))
def test_a_late_rank_alone_is_charged_with_what_it_cost(num_ranks):
    run_case(num_ranks, "cases_late_rank:on_gpus")


@pytest.mark.parametrize("num_ranks", at_ranks(2, 4))
def test_a_rank_that_is_late_while_all_set_up_is_waited_for_and_one_in_service_is_not(num_ranks):
    run_case(num_ranks, "cases_late_rank:while_setting_up")
