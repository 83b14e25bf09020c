"""Ranks without MPI, over the wire: TCP and the paced memory, on one host and on two of namespaces."""

import signal

import pytest

from eprt import LLM, SamplingParams
from tests.ranks.cases_wire import PROMPTS
from tests.ranks.launch import ROOT
from tests.ranks.launch_torch import finish
from tests.ranks.launch_wire import run_wire_ranks, start_wire_ranks

CASES = "tests.ranks.cases_wire"
MODEL = ROOT / "examples/demo_model/checkpoint"
# Puts overtake each other, words come late and twice, arenas and rings are full nearly always.
DISTURBED = "paced:gbps=2,latency_us=20,reorder_us=200,delay_words=0.1,repeat_words=0.1,threads=2,ring=2,arena_kib=4"


@pytest.mark.parametrize(
    "num_ranks, ranks_per_node, num_nodes, wire", [(4, 2, 2, DISTURBED), (3, 1, 3, "tcp:threads=2")]
)
def test_exchange(num_ranks, ranks_per_node, num_nodes, wire):
    nodes = {"EPRT_RANKS_PER_NODE": str(ranks_per_node)}
    sizes = {"num_nodes": num_nodes, "num_configs": 4, "num_epochs": 60}
    run_wire_ranks(num_ranks, f"{CASES}:exchange", wire=wire, extra_env=nodes, **sizes)


def test_a_proxy_thread_that_ends_is_named():
    said = run_wire_ranks(2, f"{CASES}:end_a_proxy_thread", extra_env={"EPRT_RANKS_PER_NODE": "1"}, victim=1)
    assert [f"rank {rank} heard of the thread" in said[rank] for rank in range(2)] == [True, True]


def test_two_hosts(hosts):
    addresses, commands = hosts
    with LLM(MODEL, dtype="float32", max_num_seqs=4, chunk_size=16) as llm:
        answers = llm.generate(PROMPTS, SamplingParams(max_tokens=12, temperature=0, ignore_eos=True))
    expected = [list(answer.outputs[0].token_ids) for answer in answers]
    run_wire_ranks(
        4,
        f"{CASES}:on_hosts_of_their_own",
        meeting=f"{addresses[0]}:7919",
        hosts=commands,
        ranks_per_host=2,
        model=str(MODEL),
        expected=expected,
    )


def test_a_killed_rank_of_another_host_is_named(hosts):
    """Its processes are not seen from here: the end of its connections tells."""
    addresses, commands = hosts
    target = "tests.ranks.cases_ep_wait:lose_a_rank"
    started = start_wire_ranks(2, target, meeting=f"{addresses[0]}:7920", hosts=commands, victim=1, phase="combine")
    results = finish(started, timeout_s=400)
    assert "rank 0 survived the loss of 1 in combine" in results[0][1], results
    assert results[1][0] in (-signal.SIGKILL, 128 + signal.SIGKILL), results
