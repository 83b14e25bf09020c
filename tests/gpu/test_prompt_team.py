"""Prompts that several GPUs compute together: the answers of one GPU, and a rank that is killed amid a prompt."""

import pytest

from tests.gpu.gpus import MOST_RANKS, at_ranks, need_gpus

pytest.importorskip("triton")

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(MOST_RANKS < 2, reason="needs two NVIDIA GPUs with peer access")]
CASES = "tests.gpu.cases_prompt_team"


@pytest.mark.parametrize("case", ["answers_in_float32", "answers_in_bfloat16"])
@pytest.mark.parametrize("num_ranks", at_ranks(2, 4))
def test_answers_are_those_of_one_gpu(num_ranks, case):
    need_gpus(num_ranks)
    from tests.ranks.launch import run_ranks

    print(run_ranks(num_ranks, f"{CASES}:{case}", timeout_s=280))


@pytest.mark.parametrize("num_ranks", at_ranks(2, 4))
def test_a_rank_dies_amid_a_prompt_and_the_others_go_on(num_ranks, tmp_path):
    need_gpus(num_ranks)
    from tests.ranks.launch_host import run_host_ranks

    options = {"elastic": True, "timeout_s": 280, "folder": str(tmp_path)}
    results = run_host_ranks(num_ranks, f"{CASES}:a_rank_dies", **options)
    for rank, (status, output) in enumerate(results):
        killed = rank == num_ranks - 1
        assert status == (-9 if killed else 0), f"rank {rank} ended with {status}:\n{output}"
        assert killed or "WENT ON" in output
