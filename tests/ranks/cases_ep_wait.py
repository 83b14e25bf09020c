"""What every rank does in test_ep.py about waiting, blaming and dying; and the list of all cases."""

import math
import os
import random
import signal
import threading
import time
from contextlib import ExitStack
from typing import Any

import pytest
import torch

from eprt.ep import reference
from eprt.ep.api import Backend
from eprt.ep.config import EPConfig
from eprt.ep.errors import EPTimeoutError, RankLostError
from eprt.ep.group.group import EPGroup
from eprt.ep.group.int_all_gather import IntAllGather
from eprt.ep.reference import SentTokens
from eprt.ep.registry import make_backend
from eprt.ep.stats import EPStats
from tests.ranks.cases_ep import (
    forward,
    make_tokens,
    many_epochs,
    more_tokens_than_the_maximum,
    random_cases,
    same_bits_whoever_computes,
)
from tests.ranks.cases_int_all_gather import int_all_gather_cases
from tests.ranks.moments import Moments


class LateError(Exception):
    pass


def deadline_names_the_late_rank(group: EPGroup) -> None:
    config = EPConfig(16, group.size, top_k=1, num_max_tokens_per_rank=2, timeout_s=0.3)
    backend = make_backend("cpu", config, group)
    late = group.size - 1
    x_TH, slot_TK, weights_TK = torch.ones(1, 16, dtype=torch.bfloat16), torch.tensor([[0]]), torch.ones(1, 1)
    if group.rank != late:
        handle = backend.dispatch_send(x_TH, slot_TK, weights_TK)
    group.barrier()  # nobody else is late
    if group.rank != late:
        with pytest.raises(EPTimeoutError, match=r"is rank \d+ alive") as caught:
            backend.dispatch_recv(handle)
        error = caught.value
        assert error.rank == group.rank and error.phase.startswith("dispatch") and error.expected == 1
        if group.num_nodes == 1:
            assert (error.peer, error.seen) == (late, 0)
    group.barrier()
    backend.close()


def waits_leave_threads_and_signals_alone(group: EPGroup) -> None:
    """While rank 0 waits its other threads run and its signal handlers too; an interrupted wait can be resumed."""
    config = EPConfig(16, group.size, top_k=1, num_max_tokens_per_rank=2)
    backend = make_backend("cpu", config, group)
    mine = SentTokens(torch.ones(1, 16, dtype=torch.bfloat16), torch.tensor([[0]]), torch.ones(1, 1))
    if group.rank == 0:
        handle = backend.dispatch_send(mine.x_TH, mine.slot_idx_TK, mine.topk_weights_TK)

        def ring(*_: Any) -> None:
            raise LateError

        def tick_and_ring() -> None:
            for _ in range(20):
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGALRM)

        previous = signal.signal(signal.SIGALRM, ring)
        thread = threading.Thread(target=tick_and_ring)
        with pytest.raises(LateError):
            thread.start()
            backend.dispatch_recv(handle)
        thread.join()
        signal.signal(signal.SIGALRM, previous)
    group.allgather(None)  # only now do the others send
    if group.rank != 0:
        handle = backend.dispatch_send(mine.x_TH, mine.slot_idx_TK, mine.topk_weights_TK)
    got = backend.dispatch_recv(handle)
    backend.combine_send(got.x_RH.clone(), handle)
    assert torch.equal(backend.combine_recv(handle), mine.x_TH)
    backend.close()


def stats_count_and_blame(group: EPGroup) -> None:
    """Counts agree with the routes; the time waited for a late rank is written to its name."""
    config = EPConfig(16, group.size * 3, top_k=4, num_max_tokens_per_rank=6)
    backend = make_backend("cpu", config, group)
    rng, moments = random.Random(3), Moments(group)
    late, num_calls = group.size // 2, 3
    others = [rank for rank in range(group.size) if rank != late]
    recv_N, sent_N, slot_E = (torch.zeros(n, dtype=torch.int64) for n in (group.size, group.size, 3))
    for call in range(num_calls):
        tokens = make_tokens(rng, config, group.size, "masked")
        for slot, *_ in reference.routes_to(group.rank, config, tokens):
            slot_E[slot] += 1
        for rank in range(group.size):
            recv_N[rank] += ((tokens[rank].slot_idx_TK // 3) == group.rank).any(1).sum()
            sent_N[rank] += ((tokens[group.rank].slot_idx_TK // 3) == rank).any(1).sum()
        with ExitStack() as stack:
            if group.rank == late:
                _come_last(moments, f"dispatch-{call}", others)
                forward(backend, tokens[group.rank])
            else:
                forward(backend, tokens[group.rank], lambda at=f"dispatch-{call}": _wait_at(moments, at, stack))
    stats = _stats_of(backend, reset=True)
    assert stats.num_calls == num_calls and stats.compute_us > 0
    assert stats.recv_tokens_N.tolist() == recv_N.tolist() and stats.sent_tokens_N.tolist() == sent_N.tolist()
    if group.size > 1 and group.rank != late:
        assert stats.dispatch_wait_us_N.argmax() == late, stats.dispatch_wait_us_N
    assert stats.dispatch_wait_us_N[group.rank] == stats.combine_wait_us_N[group.rank] == 0
    assert _stats_of(backend).num_calls == 0 and _stats_of(backend).recv_tokens_N.sum() == 0
    # Experts of the late rank are slow this time.
    handle = backend.dispatch_send(*_some_tokens())
    y_RH = backend.dispatch_recv(handle).x_RH.clone()
    with ExitStack() as stack:
        if group.rank == late:
            _come_last(moments, "combine", others)
        backend.combine_send(y_RH, handle)
        if group.rank != late:
            _wait_at(moments, "combine", stack)
        backend.combine_recv(handle)
    assert group.rank == late or _stats_of(backend).combine_wait_us_N.argmax() == late, backend.stats()
    moments.close()
    backend.close()


def _stats_of(backend: Backend, reset: bool = False) -> EPStats:
    stats = backend.stats(reset)
    assert stats is not None
    return stats


def _come_last(moments: Moments, name: str, others: list[int]) -> None:
    """When the others have sent, and wait."""
    moments.group.barrier()
    moments.wait(name, others)
    time.sleep(0.1 * (moments.group.num_nodes > 1))  # what others' leaders pass on takes its time too


def _wait_at(moments: Moments, name: str, stack: ExitStack) -> None:
    moments.group.barrier()
    stack.enter_context(moments.told_in_a_wait(name))


def _some_tokens() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.ones(1, 16, dtype=torch.bfloat16), torch.tensor([[0, 1, 2, -1]]), torch.ones(1, 4)


def configs_must_agree(group: EPGroup) -> None:
    with pytest.raises(ValueError, match=r"EPConfig.hidden_size must be equal on all ranks, but by rank it is \[16"):
        make_backend("cpu", EPConfig(16 + group.rank, group.size, 1, 1), group)


def windows_share_memory(group: EPGroup) -> None:
    """Every rank sees what the others of its node wrote, also when /dev/shm has no room."""
    for free_bytes in (1 << 40, 0):
        with pytest.MonkeyPatch.context() as patch:
            if type(group).__name__ == "MpiGroup":
                patch.setattr("eprt.ep.group.mpi_group._free_shm_bytes", lambda free_bytes=free_bytes: free_bytes)
            window = group.shared_window(5000 + group.rank)
        own = window.segments[group.local_ranks.index(group.rank)]
        assert not own.any()
        own[:] = group.rank + 1
        group.barrier()
        for rank, segment in zip(group.local_ranks, window.segments):
            assert segment.size == 5000 + rank and (segment == rank + 1).all() and segment.ctypes.data % 4096 == 0
        group.barrier()
        window.close()


def everything(group: EPGroup, num_nodes: int, num_configs: int) -> None:
    assert group.num_nodes == num_nodes, group.node_of_rank
    windows_share_memory(group)
    int_all_gather_cases(group, num_nodes)
    random_cases(group, seed=10 * group.size + num_nodes, num_configs=num_configs)
    many_epochs(group, num_epochs=300 if group.size <= 4 else 100)
    more_tokens_than_the_maximum(group)
    stats_count_and_blame(group)
    if num_nodes == 1:
        same_bits_whoever_computes(group)
    if group.size > 1:
        configs_must_agree(group)
        waits_leave_threads_and_signals_alone(group)
        deadline_names_the_late_rank(group)


def everything_in_groups(group: EPGroup, rounds: list[list[tuple[int, int | None, int]]]) -> None:
    """For MPI. In each round the first ranks are the first group, the next the second; the rest wait."""
    from mpi4py import MPI

    for groups in rounds:
        color, first = MPI.UNDEFINED, 0
        for index, (size, _, _) in enumerate(groups):
            color = index if first <= group.rank < first + size else color
            first += size
        comm = MPI.COMM_WORLD.Split(color, group.rank)
        if comm == MPI.COMM_NULL:
            continue
        _, ranks_per_node, num_nodes = groups[color]
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("EPRT_RANKS_PER_NODE", "" if ranks_per_node is None else str(ranks_per_node))
            part = EPGroup.from_mpi(comm)
        everything(part, num_nodes, num_configs=8 if part.size > 3 else 16)
        part.close()
        comm.Free()


# -- death --


def lose_a_rank(group: EPGroup, victim: int, phase: str) -> None:
    """The victim kills itself, others wait for it: they learn it at once, and can still close."""
    gather = IntAllGather(group, 1)
    config = EPConfig(16, group.size, top_k=1, num_max_tokens_per_rank=2, timeout_s=60)
    backend = make_backend("cpu", config, group)
    forward(backend, SentTokens(*_one_token()))
    moments = Moments(group)

    def die_at(here: str) -> None:
        if phase == here and group.rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)

    start = time.monotonic()
    with pytest.raises(RankLostError, match=f"rank {victim} died during") as caught:
        die_at("exchange")
        gather.all_gather([1], timeout_s=math.inf)
        die_at("dispatch")
        handle = backend.dispatch_send(*_one_token())
        got = backend.dispatch_recv(handle)
        die_at("combine")
        backend.combine_send(got.x_RH.clone(), handle)
        backend.combine_recv(handle)
    assert (caught.value.rank, caught.value.lost) == (group.rank, victim)
    took_s = time.monotonic() - start
    moments.close_apart(victim)
    backend.close()
    gather.close()
    group.close()
    print(f"rank {group.rank} survived the loss of {victim} in {phase}, {took_s:.2f} s", flush=True)


def _one_token() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.ones(1, 16, dtype=torch.bfloat16), torch.tensor([[0]]), torch.ones(1, 1)


def print_and_wait(group: EPGroup) -> None:
    gather = IntAllGather(group, 1)
    gather.all_gather([1])
    print("ready", flush=True)
    time.sleep(60)
