"""Lines of 128 bytes between GPUs arrive as a whole: what the low-latency kernels take for granted (lines.cuh)."""

import pytest

from tests.gpu.gpus import MOST_RANKS, at_ranks, not_shared, run_case

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(MOST_RANKS < 2, reason="needs two NVIDIA GPUs with peer access")]
pytestmark.append(not_shared("nobody looks at a line while it changes"))


@pytest.mark.parametrize("num_ranks", at_ranks(2, 4, 8))
def test_a_line_that_changes_all_the_time_is_never_seen_half_old(num_ranks):
    run_case(num_ranks, "cases_lines:no_torn_lines", rounds=20_000)
