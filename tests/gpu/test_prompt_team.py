"""Prompts that several GPUs compute together: the answers of prompts that one computes, and a rank that is killed."""

import pytest

from tests.gpu.gpus import MOST_RANKS, at_ranks, need_gpus

pytest.importorskip("triton")

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(MOST_RANKS < 2, reason="needs two NVIDIA GPUs with peer access")]
MODULE = "tests.gpu.cases_prompt_team"
MORE_CASES = ["answers_in_float32", "answers_in_one_piece", "answers_with_an_fp8_cache", "entries_of_large_heads"]


@pytest.mark.parametrize("num_ranks", at_ranks(2, 4))
def test_answers_do_not_depend_on_who_computes(num_ranks):
    run_on(num_ranks, "answers_in_chunks", timeout_s=120)


@pytest.mark.long
@pytest.mark.parametrize("case", MORE_CASES)
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_other_answers_do_not_depend_on_who_computes(num_ranks, case):
    run_on(num_ranks, case, timeout_s=280)


@pytest.mark.long
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_rank_dies_amid_a_prompt_and_the_others_go_on(num_ranks, tmp_path):
    need_gpus(num_ranks)
    from tests.ranks.launch_host import run_host_ranks

    options = {"elastic": True, "timeout_s": 280, "folder": str(tmp_path)}
    results = run_host_ranks(num_ranks, f"{MODULE}:a_rank_dies", **options)
    for rank, (status, output) in enumerate(results):
        killed = rank == num_ranks - 1
        assert status == (-9 if killed else 0), f"rank {rank} ended with {status}:\n{output}"
        assert killed or "WENT ON" in output


def run_on(num_ranks: int, case: str, timeout_s: float) -> None:
    need_gpus(num_ranks)
    from tests.ranks.launch import run_ranks

    print(run_ranks(num_ranks, f"{MODULE}:{case}", timeout_s=timeout_s))
