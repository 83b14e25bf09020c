"""What every rank does in test_wire.py: groups that meet at an address, and what ends their waits."""

import os
import random
from pathlib import Path

import numpy as np
import pytest

from eprt.ep.config import EPConfig
from eprt.ep.errors import EPError
from eprt.ep.registry import make_backend
from eprt.ep.wire.wire_group import WireGroup
from tests.ranks.cases_ep import forward, make_tokens, many_epochs, random_cases
from tests.ranks.cases_int_all_gather import exchange_many, int_all_gather_cases
from tests.ranks.moments import Moments

PROMPTS = [[1, 5, 9, 12], [3, 3, 7], [2, 8, 20, 31, 40, 6]]


def exchange(group: WireGroup, num_nodes: int, num_configs: int, num_epochs: int) -> None:
    """Against the oracle bit for bit: every skew, masked entries, ranks without tokens, all to one."""
    assert group.num_nodes == num_nodes, group.node_of_rank
    if group.num_ranks_on_host == group.size:
        int_all_gather_cases(group, num_nodes)  # they meet in a folder, which hosts do not share
    else:
        exchange_many(group, num_steps=100, num_values=5)
    random_cases(group, seed=100 * group.size + num_nodes, num_configs=num_configs)
    many_epochs(group, num_epochs)
    messages_of_all_sizes(group)


def messages_of_all_sizes(group: WireGroup) -> None:
    """Longer than an arena too, to every rank of another node at once."""
    sizes = [0, 1, 17, 4096, 100_001]
    others = [rank for rank in range(group.size) if group.node_of_rank[rank] != group.node]
    tag = group.new_channel()
    sent = {peer: [np.full(n, 16 * group.rank + peer, dtype=np.uint8) for n in sizes] for peer in others}
    got = {peer: [np.zeros(n + 3, dtype=np.uint8) for n in sizes] for peer in others}
    waited = [group.isend(buffer, peer, tag) for peer in others for buffer in sent[peer]]
    waited += [group.irecv(buffer, peer, tag) for peer in others for buffer in got[peer]]
    while waited:
        waited = [message for message in waited if not message.test()]
    for peer in others:
        for n, buffer in zip(sizes, got[peer]):
            assert (buffer[:n] == 16 * peer + group.rank).all() and not buffer[n:].any()


def on_hosts_of_their_own(group: WireGroup, ranks_per_host: int, model: str, expected: list[list[int]]) -> None:
    """Nothing is shared but the checkout: the exchange is the oracle's, and a model's tokens those of one process."""
    assert group.num_ranks_on_host == ranks_per_host and group.num_nodes == group.size // ranks_per_host
    for folder in ("/dev/shm", "/tmp"):
        if Path(model).is_relative_to(folder):
            continue
        Path(folder, f"eprt-host-{group.node}").touch()
        group.barrier()
        seen = sorted(name for name in os.listdir(folder) if name.startswith("eprt-host-"))
        assert seen == [f"eprt-host-{group.node}"], seen
    exchange(group, group.num_nodes, num_configs=2, num_epochs=40)
    from eprt import LLM, SamplingParams  # loads all of the engine, which the other cases do without

    with LLM(model, group=group, dtype="float32", max_num_seqs=4, chunk_size=16) as llm:
        answers = llm.generate(PROMPTS, SamplingParams(max_tokens=12, temperature=0, ignore_eos=True))
    assert [list(answer.outputs[0].token_ids) for answer in answers] == expected


def end_a_proxy_thread(group: WireGroup, victim: int) -> None:
    """Who waits learns whose proxy has ended, and in which phase; nobody waits until the deadline."""
    config = EPConfig(16, group.size, top_k=1, num_max_tokens_per_rank=2, timeout_s=100)
    backend = make_backend("cpu", config, group)
    tokens = make_tokens(random.Random(1), config, group.size, "uniform")[group.rank]
    moments = Moments(group)
    forward(backend, tokens)
    moments.tell("forwarded")
    if group.rank == victim:
        moments.wait("forwarded", range(group.size))  # what they wait for may still be with the thread
        group.end_proxy_thread(0)
    what = rf"proxy thread 0 of rank {victim} has ended"
    with pytest.raises(EPError, match=rf"\[rank {group.rank}/2\] lost touch with rank \d in .* between nodes: {what}"):
        for _ in range(3):
            forward(backend, tokens)
    moments.close_apart()
    backend.close()
    group.close()
    print(f"rank {group.rank} heard of the thread", flush=True)
