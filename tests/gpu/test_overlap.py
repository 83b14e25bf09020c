"""Overlap on GPUs: in float32 (host memory) the same tokens, in bfloat16 over NVLink nearly the same."""

import pytest

from tests.gpu.gpus import MOST_RANKS, at_ranks, need_gpus

pytest.importorskip("triton")

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(MOST_RANKS < 1, reason="needs an NVIDIA GPU")]


@pytest.mark.parametrize("dtype, least", [pytest.param("float32", 1.0, marks=pytest.mark.long), ("bfloat16", 0.7)])
@pytest.mark.parametrize("num_ranks", at_ranks(2, 4))
def test_every_overlap_gives_the_same_tokens(num_ranks, dtype, least):
    """float32 goes through host memory, so ranks may share a GPU."""
    from tests.ranks.launch import run_ranks

    if dtype == "bfloat16":
        need_gpus(num_ranks)
    print(run_ranks(num_ranks, "tests.gpu.cases_overlap:same_tokens", dtype=dtype, least=least, timeout_s=280))
