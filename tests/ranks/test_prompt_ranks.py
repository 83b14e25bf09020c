"""Prompts that several ranks compute: answers, to the bit, are those of ranks that compute their own."""

import pytest

from tests import tiny
from tests.ranks import cases_views
from tests.ranks.launch_host import run_host_ranks
from tests.ranks.launch_torch import assert_all_ended_well
from tests.ranks.test_views import run

CASES = "tests.ranks.cases_prompt_ranks"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny.save(tiny.make_model("v3", max_position_embeddings=4096), tmp_path_factory.mktemp("prompt_ranks"))


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 7])
def test_answers_are_those_of_one_rank(checkpoint, num_ranks):
    assert_all_ended_well(run_host_ranks(num_ranks, f"{CASES}:run_all", directory=str(checkpoint)))


def test_ranks_die_while_they_compute_prompts_together(checkpoint, tmp_path):
    moments = {"num_redundant": 48, "moments": ["entries", "prefill", "entries"], "migrates": False}
    options = {**moments, "prompt_ranks": 4, "chunk_size": 40, "max_num_seqs": 3}
    expected = cases_views.undisturbed(str(checkpoint))
    assert run(f"{CASES}:ranks_die", 4, checkpoint, tmp_path, killed=(1, 2, 3), **options) == expected


def test_a_rank_enters_and_leaves_a_team(checkpoint, tmp_path):
    expected = cases_views.undisturbed(str(checkpoint))
    assert run(f"{CASES}:enters_and_leaves", 3, checkpoint, tmp_path, prompt_ranks=3, chunk_size=40) == expected
