"""What the number of ranks does not allow, wherever the number comes from."""

from dataclasses import replace

import pytest

from eprt.serve.flags import parse_options
from eprt.serve.options import OptionError, ServeOptions
from eprt.serve.rank_fit import check_ranks, num_nodes, why_no_teams
from tests.unit.cases import MODEL


def options(*flags: str) -> ServeOptions:
    return parse_options(["--model", str(MODEL), *flags])


def check(given: ServeOptions, num_ranks: int, nodes: int = 1) -> None:
    check_ranks(given, num_ranks, nodes, "without -n there", "give -n")


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_teams_need_a_multiple_of_their_size(num_ranks, size):
    engine = replace(options().engine, attention_tp=size)
    why = why_no_teams(engine, num_ranks)
    assert (why == "") == (num_ranks % size == 0)
    if why:
        assert why.startswith(f"--attention-tp {size}: {num_ranks} rank") and "must be a multiple of it" in why


@pytest.mark.parametrize(
    "flags, num_ranks, words",
    [
        (
            ["--attention-tp", "2"],
            1,
            "--attention-tp 2: without -n there is 1 rank, of which no teams of 2 can be made; give -n, a",
        ),
        (["--attention-tp", "2"], 3, "--attention-tp 2: without -n there are 3 ranks, of which no teams of 2"),
        (["--prompt-ranks", "4"], 2, "--prompt-ranks 4: without -n there are 2 ranks; give -n, or leave it out"),
        (["--inject", "slow-rank:1:2x"], 1, "--inject fault slow-rank names rank 1; there are ranks 0..0"),
    ],
)
def test_too_few_ranks_are_told_with_the_remedy(flags, num_ranks, words):
    with pytest.raises(OptionError) as caught:
        check(options(*flags), num_ranks)
    assert str(caught.value).startswith(words)
    check(options(*flags), 4)


@pytest.mark.parametrize(
    "flag, value", [("--attention-tp", "2"), ("--prompt-ranks", "2"), ("--expert-host-copies", "node")]
)
def test_what_needs_shared_memory_is_refused_between_nodes(flag, value):
    given = options("-n", "4", flag, value)
    check(given, 4)
    with pytest.raises(OptionError, match=f"{flag} {value}: ranks that .* share memory, and these are of 2 nodes"):
        check(given, 4, 2)


@pytest.mark.parametrize("per_node, nodes", [(None, 1), ("1", 4), ("3", 2), ("4", 1), ("9", 1)])
def test_virtual_nodes_are_counted(monkeypatch, per_node, nodes):
    if per_node is not None:
        monkeypatch.setenv("EPRT_RANKS_PER_NODE", per_node)
    assert num_nodes(options("-n", "4")) == nodes
