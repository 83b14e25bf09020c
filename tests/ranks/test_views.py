"""Ranks are killed, interrupted, enter and leave while others go on: tokens are those of an undisturbed run."""

import json

import pytest

from tests import tiny
from tests.ranks import cases_views
from tests.ranks.launch_torch import finish, start_torch_ranks
from tests.unit.cases import MODEL

CASES = "tests.ranks.cases_views"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny.save(tiny.make_model("v3"), tmp_path_factory.mktemp("views"))


@pytest.fixture(scope="module")
def expected(checkpoint):
    return cases_views.undisturbed(str(checkpoint))


def die(num_redundant: int, moments: list[str], checkpoint, folder, migrates: bool = False, **options) -> dict:
    options = {"num_redundant": num_redundant, "moments": moments, "migrates": migrates, **options}
    return run("one_after_the_other", 4, checkpoint, folder, killed=(1, 2, 3), **options)


def run(case: str, num_ranks: int, checkpoint, folder, killed: tuple[int, ...] = (), **options) -> dict:
    """The tokens of all requests, from the ranks that are not killed."""
    options = {"directory": str(checkpoint), "folder": str(folder), **options}
    case = case if ":" in case else f"{CASES}:{case}"
    results = finish(start_torch_ranks(num_ranks, case, **options), timeout_s=600)
    tokens = {}
    for rank, (status, output) in enumerate(results):
        assert status == (-9 if rank in killed else 0), f"rank {rank} ended with {status}:\n{output}"
        for line in output.splitlines():
            if line.startswith("TOKENS "):
                tokens |= json.loads(line.removeprefix("TOKENS "))
    return tokens


def test_ranks_die_one_after_the_other_while_experts_move(checkpoint, expected, tmp_path):
    assert die(48, ["prefill", "header", "decode"], checkpoint, tmp_path, migrates=True) == expected


def test_ranks_die_in_overlapped_steps(checkpoint, expected, tmp_path):
    options = {"overlap_schedule": True, "overlap": "tbo", "chunk_size": 11}
    assert die(48, ["header", "combine", "decode"], checkpoint, tmp_path, **options) == expected


def test_ranks_die_between_drafts_and_exchanges_of_counts(tmp_path):
    """The demo model has an MTP layer."""
    options = {"num_speculative_tokens": 2, "replica_routing": "batch", "spare_experts": 0, "chunk_size": 20}
    tokens = die(96, ["decode", "prefill", "combine"], MODEL, tmp_path, **options)
    assert tokens == cases_views.undisturbed(str(MODEL))


def test_a_rank_enters_and_leaves(checkpoint, expected, tmp_path):
    tokens = run("enters_and_leaves", 3, checkpoint, tmp_path)
    assert tokens == expected


def test_a_wait_is_broken_off_and_nothing_is_lost(checkpoint, expected, tmp_path):
    assert run("interrupted", 3, checkpoint, tmp_path) == expected
