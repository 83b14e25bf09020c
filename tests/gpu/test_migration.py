"""Experts move between GPUs while they serve: tokens stay the same, weights arrive whole, no SM is needed to copy."""

import pytest

from tests.gpu.gpus import MOST_RANKS, not_shared
from tests.ranks.launch import run_ranks

pytest.importorskip("triton")

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(MOST_RANKS < 1, reason="needs an NVIDIA GPU")]
CASES = "tests.gpu.cases_migration:run_cases"


@pytest.mark.one_gpu
def test_one_rank_whose_steps_are_recorded():
    print(run_ranks(1, CASES, names=["counts", "same_tokens"], timeout_s=200))


@pytest.mark.long
def test_two_ranks_that_may_share_a_gpu():
    """In float32, through the memory that one process has of the other's experts, be it on the same GPU."""
    print(run_ranks(2, CASES, names=["same_tokens_staged", "through_host_memory", "damage"], timeout_s=280))


@pytest.mark.long
@pytest.mark.skipif(MOST_RANKS < 2, reason="needs two NVIDIA GPUs")
def test_two_gpus():
    names = ["same_tokens", "same_tokens_locally", "same_tokens_fp8", "same_tokens_int8"]
    print(run_ranks(2, CASES, names=names, timeout_s=280))


@pytest.mark.long
@pytest.mark.skipif(MOST_RANKS < 2, reason="needs two NVIDIA GPUs")
@not_shared("a copy within a GPU may be made by its SMs")
def test_copies_between_gpus_need_no_sm():
    print(run_ranks(2, CASES, names=["copies_need_no_sm"], timeout_s=280))


@pytest.mark.long
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_server_answers_the_same_while_placements_are_posted(num_ranks):
    """In float32, because batches differ from run to run; ranks may share a GPU."""
    from benchmarks.balancing.migration_proof import CHECKPOINT, prove
    from examples.demo_model.score import held_out_questions

    flags = ("--device", "cuda", "--dtype", "float32", "--max-num-seqs", "16", "--kv-cache-gb", "0.1")
    row = prove(CHECKPOINT, "fp32", 0, num_ranks, held_out_questions(24), *flags)
    assert row["differ"] == 0 and row["accuracy"] == row["moving_accuracy"] and row["commits"] > 0, row
