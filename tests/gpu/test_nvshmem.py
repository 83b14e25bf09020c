"""Low latency between virtual nodes of one host: NVSHMEM carries what crosses them, over NVLink or on one GPU.

Never over a network: that needs a network card with RDMA.
"""

import os
import subprocess
import sys

import httpx
import pytest

from tests.gpu.gpus import LONG_EPOCHS, MOST_RANKS, at_ranks, run_case

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(MOST_RANKS < 2, reason="needs two NVIDIA GPUs with peer access")]


@pytest.mark.parametrize("num_ranks, ranks_per_node", at_ranks((2, 1), (4, 2), (8, 4)))
def test_bit_for_bit(num_ranks, ranks_per_node):
    """Random shapes, handles in flight, recorded graphs, signals, masks, epochs of changing shapes."""
    how = {"ranks_per_node": ranks_per_node, "seed": num_ranks, "cases_per_shape": 2}
    print(run_case(num_ranks, "cases_nvshmem:one_launch", num_steps=200, **how))


@pytest.mark.parametrize("num_ranks, ranks_per_node", at_ranks((2, 1), (4, 2), (8, 4)))
def test_bit_for_bit_in_two_layers(num_ranks, ranks_per_node):
    """A copy of a token for each node, which a rank there hands on; what crosses is counted."""
    how = {"ranks_per_node": ranks_per_node, "seed": num_ranks}
    print(run_case(num_ranks, "cases_nvshmem:in_layers", num_steps=200, **how))


@pytest.mark.long
@pytest.mark.parametrize("num_ranks, ranks_per_node", [(4, 1), (8, 2)])
def test_more_nodes_and_more_epochs(num_ranks, ranks_per_node):
    how = {"ranks_per_node": ranks_per_node, "seed": num_ranks, "cases_per_shape": 4}
    run_case(num_ranks, "cases_nvshmem:one_launch", num_steps=LONG_EPOCHS, **how)


@pytest.mark.parametrize("num_ranks, ranks_per_node", at_ranks((2, 1), (4, 2)))
def test_nvshmem_starts_and_ends_again(num_ranks, ranks_per_node):
    print(run_case(num_ranks, "cases_nvshmem:memory", ranks_per_node=ranks_per_node, cycles=3))


def test_what_cannot_be_is_refused_before_anything_is_launched():
    run_case(min(MOST_RANKS, 4), "cases_nvshmem:refusals", ranks_per_node=1)


def test_the_others_go_on_when_a_rank_of_another_node_is_killed():
    printed = run_case(2, "cases_nvshmem:killed_rank", ranks_per_node=1, victim=1, killed=(1,))
    assert "rank 1" in printed


def test_a_server_on_two_virtual_nodes_answers_a_chat():
    """Decodes over NVSHMEM, prompts over TCP and host memory."""
    from tests.gpu.cases_model import DEMO
    from tests.gpu.test_model import _wait_until_healthy
    from tests.ranks.launch import ROOT

    port = 8171
    command = [sys.executable, "-m", "eprt.serve", "-n", "2", "--model", str(DEMO), "--device", "cuda"]
    command += ["--wire", "nvshmem", "--port", str(port), "--kv-cache-gb", "0.1"]
    server = subprocess.Popen(command, cwd=ROOT, env={**os.environ, "EPRT_RANKS_PER_NODE": "1"})
    try:
        _wait_until_healthy(server, port)
        for a, b in ((12, 30), (25, 18)):
            question = {"messages": [{"role": "user", "content": f"What is {a} + {b}?"}], "temperature": 0}
            answer = httpx.post(f"http://127.0.0.1:{port}/v1/chat/completions", json=question, timeout=60).json()
            assert str(a + b) in answer["choices"][0]["message"]["content"], answer
    finally:
        server.terminate()
        assert server.wait(timeout=60) == 0
