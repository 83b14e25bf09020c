"""A GPU that is late: the others' statistics charge it alone."""

import pytest

from tests.gpu.gpus import MOST_RANKS, at_ranks, not_shared, run_case

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(MOST_RANKS < 2, reason="needs two NVIDIA GPUs with peer access")]
pytestmark.append(not_shared("each waits for whoever has the GPU"))


@pytest.mark.parametrize("num_ranks", at_ranks(2, 4, 8))
def test_a_late_rank_alone_is_charged_with_what_it_cost(num_ranks):
    run_case(num_ranks, "cases_late_rank:on_gpus")
