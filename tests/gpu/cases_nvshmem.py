"""What every rank does in test_nvshmem.py: low latency between virtual nodes, NVSHMEM carrying what crosses them."""

import functools
import os
import time
from typing import Any

import torch

from eprt.cluster.crossings import ExpertChoice, parts_elsewhere
from eprt.ep.group.group import EPGroup
from eprt.ep.nvlink.nvshmem_backend import NvshmemBackend
from eprt.gpu.nvshmem import Nvshmem
from eprt.gpu.nvshmem_memory import NvshmemMemory
from tests.gpu import cases_low_latency_lost_ranks
from tests.gpu.cases_low_latency import (
    SHAPES,
    fp8_power_of_two_scales,
    graph_replay,
    make,
    make_config,
    many_epochs,
    random_shapes,
    two_in_flight,
)
from tests.gpu.cases_low_latency_lost_ranks import masked_before
from tests.gpu.cases_low_latency_signals import tile_signals


def split_into_nodes(group: EPGroup, ranks_per_node: int) -> EPGroup:
    """As EPRT_RANKS_PER_NODE would, had the process been started with it."""
    group.node_of_rank = tuple(rank // ranks_per_node for rank in range(group.size))
    return group


def memory(group: EPGroup, ranks_per_node: int, cycles: int) -> None:
    """NVSHMEM starts and ends several times in a process; ranks of a node are mapped, others are not."""
    split_into_nodes(group, ranks_per_node)
    for cycle in range(cycles):
        started = time.monotonic()
        first, second = (NvshmemMemory(group, size, True) for size in (1 << 20, 3 << 20))
        mapped = [pointer != 0 for pointer in first.peer_ptr]
        assert mapped == [node == group.node for node in group.node_of_rank], first.peer_ptr
        assert first.peer_ptr[group.rank] % 128 == 0
        first.close()
        second.close()
        assert Nvshmem._joined is None
        print(f"cycle {cycle}: {time.monotonic() - started:.2f} s", flush=True)


def refusals(group: EPGroup, ranks_per_node: int) -> None:
    """Before anything is launched, on all ranks, in words that name the remedy."""
    split_into_nodes(group, ranks_per_node)

    def refused(call: Any, *words: str) -> None:
        try:
            call()
        except (ValueError, RuntimeError) as error:
            assert all(word in str(error) for word in words), error
            return
        raise AssertionError(f"nothing was raised; expected {words}")

    refused(lambda: NvshmemMemory(group, 1 << 45, True), "MiB are free")
    refused(lambda: NvshmemMemory(group, 1 << 20 if group.rank else 1 << 21, True), "but rank")
    config = make_config(group, (256, 4, 2, 8, "same", False))
    backend = make(group, config)
    refused(backend.readmit, "a new group")
    backend.close()
    if group.size > 2:
        group.node_of_rank = (0, 0, *range(1, group.size - 1))
        refused(lambda: make(group, config), "equally many ranks on each node", "staged")


def one_launch(group: EPGroup, ranks_per_node: int, seed: int, cases_per_shape: int, num_steps: int) -> None:
    """As cases_low_latency_one_launch.one_launch, as far as ranks need not return."""
    split_into_nodes(group, ranks_per_node)
    cases: list[Any] = [two_in_flight, graph_replay, masked_before, fp8_power_of_two_scales]
    cases += [functools.partial(tile_signals, exact=exact) for exact in (False, True)]
    cases.append(functools.partial(many_epochs, num_steps=num_steps))
    cases.append(functools.partial(random_shapes, seed=seed, cases_per_shape=cases_per_shape))
    for case in cases:
        started = time.monotonic()
        case(group)
        if group.rank == 0:
            name = getattr(case, "__name__", case)
            print(f"pid {os.getpid()} {name}: {time.monotonic() - started:.1f} s", flush=True)


def in_layers(group: EPGroup, ranks_per_node: int, seed: int, num_steps: int) -> None:
    """As one_launch, with a copy of a token for each node; and what crosses, by the planner's count."""
    split_into_nodes(group, ranks_per_node)
    vars(group)["gpu_copies"] = "node"
    cases: list[Any] = [crossings, two_in_flight, graph_replay, masked_before]
    cases += [functools.partial(tile_signals, exact=exact) for exact in (False, True)]
    cases.append(functools.partial(many_epochs, num_steps=num_steps))
    cases.append(functools.partial(random_shapes, seed=seed, cases_per_shape=2, shapes=SHAPES[:4:3]))
    for case in cases:
        started = time.monotonic()
        case(group)
        if group.rank == 0:
            name = getattr(case, "__name__", case)
            print(f"pid {os.getpid()} {name}: {time.monotonic() - started:.1f} s", flush=True)


def crossings(group: EPGroup) -> None:
    """A token crosses once to each other node that it goes to, and one row comes back from there."""
    config = make_config(group, (1024, 8, 4, 64, "same", False))
    backend = make(group, config)
    assert isinstance(backend, NvshmemBackend)
    generator = torch.Generator().manual_seed(group.rank)
    slots = torch.stack([torch.randperm(config.num_slots, generator=generator)[:4] for _ in range(64)])
    handle, received = backend.dispatch(torch.ones(64, 1024).bfloat16().cuda(), slots.cuda(), torch.ones(64, 4).cuda())
    backend.combine(received.x_RH, handle)
    node_of_slot = torch.tensor(group.node_of_rank).repeat_interleave(8)
    nodes = node_of_slot[slots]
    mine = sum(int((nodes == node).any(1).sum()) for node in set(group.node_of_rank) - {group.node})
    messages, rows = backend.crossings()
    everyone = group.allgather((messages, rows, mine))
    assert messages == mine, (messages, mine)
    assert sum(rows for _, rows, _ in everyone) == sum(mine for _, _, mine in everyone), everyone
    planned = 64 * parts_elsewhere(ExpertChoice(config.num_slots, 4), group.num_nodes)
    assert abs(mine - planned) < 64 * 0.25, (mine, planned)  # five standard deviations or more
    backend.close()


def killed_rank(group: EPGroup, ranks_per_node: int, victim: int) -> None:
    """As cases_low_latency_lost_ranks.killed_rank."""
    cases_low_latency_lost_ranks.killed_rank(split_into_nodes(group, ranks_per_node), victim)
