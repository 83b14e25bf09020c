"""The engine over real processes: the same tokens on 1, 2, 3 and 4 ranks, and ranks that sleep and wake together."""

import json

import pytest

from tests import tiny
from tests.ranks.launch import run_ranks
from tests.ranks.launch_host import run_host_ranks
from tests.ranks.launch_torch import assert_all_ended_well


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny.save(tiny.make_model("v3"), tmp_path_factory.mktemp("engine"))


@pytest.fixture(scope="module")
def tokens(checkpoint):
    """Number of ranks -> what rank 0 printed as tokens; each number is launched once, and runs all the other cases.
    Two ranks are MPI's, others are started as by the server's launcher."""

    def run(num_ranks: int):
        case = "tests.ranks.cases_engine:run_all"
        if num_ranks == 2:
            printed = run_ranks(num_ranks, case, directory=str(checkpoint))
        else:
            results = run_host_ranks(num_ranks, case, directory=str(checkpoint))
            assert_all_ended_well(results)
            printed = results[0][1]
        (line,) = [line for line in printed.splitlines() if line.startswith("TOKENS ")]
        return json.loads(line.removeprefix("TOKENS "))

    return {1: run(1), "run": run}


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_any_number_of_ranks_gives_the_same_tokens(tokens, num_ranks):
    assert tokens["run"](num_ranks) == tokens[1]
    assert sum(len(completion) for prompt in tokens[1] for completion in prompt) > 100
