"""What every rank does under emulation when one of them is lost, or left out, in the middle of a call."""

import random
import threading
import time
from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import torch

from eprt.compat.deep_ep.rows import RowExchange
from eprt.ep.errors import EPTimeoutError
from eprt.ep.group.group import EPGroup
from eprt.ep.nvlink.backend import NvlinkBackend
from eprt.ep.nvlink.low_latency import Signal
from eprt.ep.nvlink.low_latency_backend import NvlinkLowLatencyBackend
from tests.gpu import cases_low_latency, cases_normal
from tests.ranks.cases_ep import make_tokens


def masked_statistics(group: EPGroup, shape: Sequence, mode: str) -> None:
    """What is not sent to a masked rank does not count as sent, nor what does not come from it as received."""
    cases: Any = {"low_latency": cases_low_latency, "normal": cases_normal}[mode]
    backend, rank, last = cases.make(group, cases.make_config(group, shape), num_sms=3), group.rank, group.size - 1
    with_me = [last] if rank == last else list(range(last))
    for other in set(range(group.size)) - set(with_me):
        backend.mask_rank(other)
    num_tokens = [5 + r for r in range(group.size)]
    T, top_k, local = num_tokens[rank], backend.config.top_k, backend.config.num_slots // group.size
    x = torch.ones(T, backend.config.hidden_size, dtype=torch.bfloat16, device="cuda")
    one_of_each_rank = torch.tensor([[r * local for r in range(group.size)] + [-1] * (top_k - group.size)] * T)
    handle, received = backend.dispatch(x, one_of_each_rank, torch.ones(T, top_k, device="cuda"))
    backend.combine(torch.zeros(received.x_RH.shape, dtype=torch.bfloat16, device="cuda"), handle)
    stats = backend.stats()
    assert stats.sent_tokens_N.tolist() == [T * (r in with_me) for r in range(group.size)]
    assert stats.recv_tokens_N.tolist() == [num_tokens[r] * (r in with_me) for r in range(group.size)]
    group.barrier()
    backend.close()


def back_after_weeks(group: EPGroup, shape: Sequence, mode: str, num_calls: int) -> None:
    """The last rank has missed calls, the others' epochs have begun anew; readmit brings all together, but not while
    one has a handle in flight, which all are told."""
    cases: Any = {"low_latency": cases_low_latency, "normal": cases_normal}[mode]
    backend, rank, last = cases.make(group, cases.make_config(group, shape), num_sms=3), group.rank, group.size - 1
    tickets = torch.tensor([1024, 1024, 1][: len(backend.kernels._ticket)])
    backend.kernels._ticket.copy_(tickets * num_calls)
    everyone = cases_low_latency.one_round(make_tokens(random.Random(3), backend.config, group.size, "uniform"))
    mine = everyone[rank]
    for other in set(range(group.size)) - {rank}:
        backend.mask_rank(other)
    for step in range(0 if rank == last else 3 + rank):
        handle, received = backend.dispatch(mine.x_TH, mine.slot_idx_TK, mine.topk_weights_TK)
        y = torch.zeros(received.x_RH.shape, dtype=torch.bfloat16, device="cuda")
        if rank == 0 and step == 2:
            expect_in_flight(backend)
        backend.combine(y, handle)
    if rank != 0:
        expect_in_flight(backend)
    backend.readmit()
    for calls in ("fused", "single") * 2:
        cases.poison(backend)
        cases.check_once(backend, everyone, calls)
    backend.close()


def expect_in_flight(backend: NvlinkLowLatencyBackend) -> None:
    try:
        backend.readmit()
        raise AssertionError("nothing was raised")
    except RuntimeError as error:
        assert f"[rank 0/{backend.group.size}] the handle of epoch 3 is in flight" in str(error), error


def lost_after_counts(group: EPGroup) -> None:
    """Rank 0 is lost between its counts and its tokens: of those its experts' numbers are -1, whatever lies there."""
    exchange, rank, T = RowExchange(group, 1 << 23, timeout_s=0.6), group.rank, 40
    x_TH = torch.full((T, 64), float(1 + rank), dtype=torch.bfloat16, device="cuda")
    one_of_each_rank = torch.arange(group.size, device="cuda").repeat(T, 1) * 2
    weights = torch.ones(T, group.size, device="cuda")
    bound = group.size * T + 3
    exchange.kernels.memory.view(exchange.kernels.data_begin, (1 << 23,), torch.uint8).fill_(0x55)
    group.barrier()

    def dispatch() -> torch.Tensor | None:
        return exchange.dispatch(
            x_TH,
            num_experts=2 * group.size,
            topk_idx_TK=one_of_each_rank,
            topk_weights_TK=weights,
            num_worst_rows=bound,
        ).topk_idx_NK

    if rank == 0:
        with patch.object(exchange.kernels, "launch_dispatch"):
            dispatch()
    else:
        idx_NK = dispatch()
        assert idx_NK is not None
        expert_N = idx_NK.max(1).values  # every token has one here
        assert expert_N.tolist() == [-1] * T + [0] * (T * (group.size - 1)) + [-1] * 3, expert_N
        assert exchange.kernels.mask.tolist() == [1] + [0] * (group.size - 1)
    group.barrier()
    exchange.close()


def lost_by_expert(group: EPGroup, shape: Sequence, fused: bool, num_sms: int) -> None:
    """The same with rows by expert: one deadline, then the outputs of the living ranks are whole."""
    backend = cases_normal.make(group, cases_normal.make_config(group, shape, timeout_s=0.6), num_sms=num_sms)
    config, rank, lost = backend.config, group.rank, 1
    T, local = config.num_max_tokens_per_rank, config.num_slots // group.size
    x = torch.ones(T, config.hidden_size, dtype=torch.bfloat16, device="cuda")
    weights, generator = torch.ones(T, config.top_k, device="cuda"), torch.Generator().manual_seed(rank)
    for turn in range(3):
        slots = torch.stack([torch.randperm(config.num_slots, generator=generator)[: config.top_k] for _ in range(T)])
        cases_normal.poison(backend)
        group.barrier()
        if turn == 2 and rank == lost:
            with patch.object(backend.kernels, "launch_dispatch"):
                backend.dispatch_send(x, slots, weights)
            break
        if fused:
            handle, received = backend.dispatch(x, slots, weights)
        else:
            handle = backend.dispatch_send(x, slots, weights)
            received = backend.dispatch_recv(handle)
        if turn == 2:
            expect_lost(backend, lost)
        y = torch.ones_like(received.x_RH)
        if fused:
            y_TH = backend.combine(y, handle)
        else:
            backend.combine_send(y, handle)
            y_TH = backend.combine_recv(handle)
        outputs = config.top_k - (slots // local == lost).sum(1) * (turn == 2)
        assert torch.equal(y_TH.float(), outputs[:, None].float().expand(y_TH.shape)), (turn, y_TH[:, 0], outputs)
    group.barrier()
    backend.close()


def forget_tokens_of(backend: NvlinkLowLatencyBackend, source: int) -> None:
    """As if those that have come to this rank never had."""
    shape = backend.kernels.shape
    lengths = 2 * shape.num_buffers, shape.num_ranks, shape.max_tokens, shape.message_bytes
    messages = backend.kernels.memory.view(shape.offsets()["message"], lengths, torch.uint8)
    messages[:, source] = 0


def lost_before_signals(group: EPGroup, shape: Sequence) -> None:
    """A rank's counts come, its tokens do not; the others' outputs, sent tile by tile as the experts finish them, are
    whole all the same. The rows before, of other tokens, are where its tokens would have been."""
    config = cases_low_latency.make_config(group, shape, timeout_s=0.6, num_buffers=1)
    backend, rank, lost = cases_low_latency.make(group, config, num_sms=2), group.rank, 1
    T, local = config.num_max_tokens_per_rank, config.num_slots // group.size
    x = torch.ones(T, config.hidden_size, dtype=torch.bfloat16, device="cuda")
    weights, generator = torch.ones(T, config.top_k, device="cuda"), torch.Generator().manual_seed(rank)
    for turn in range(3):
        slots = torch.stack([torch.randperm(config.num_slots, generator=generator)[: config.top_k] for _ in range(T)])
        handle = backend.dispatch_send(x, slots, weights)
        group.barrier()
        if turn == 2 and rank != lost:
            forget_tokens_of(backend, lost)
        group.barrier()
        if turn == 2 and rank == lost:
            break
        count = backend.dispatch_recv(handle).recv_count_E.tolist()
        if turn == 2:
            expect_lost(backend, lost)
        y = torch.full((backend.max_rows, config.hidden_size), float("nan"), dtype=torch.bfloat16, device="cuda")
        send_as_computed(backend, handle, y, count)
        y_TH = backend.combine_recv(handle)
        outputs = config.top_k - (slots // local == lost).sum(1) * (turn == 2)
        assert torch.equal(y_TH.float(), outputs[:, None].float().expand(y_TH.shape)), (turn, y_TH[:, 0], outputs)
    group.barrier()
    backend.close()


def expect_lost(backend: NvlinkBackend, lost: int, phase: str = "dispatch (tokens)") -> None:
    try:
        backend.check()
        raise AssertionError("no deadline")
    except EPTimeoutError as error:
        assert error.peer == lost and error.phase == phase, error


def send_as_computed(backend: NvlinkLowLatencyBackend, handle: Any, y: torch.Tensor, count: list[int]) -> None:
    """Rows of ones appear one by one, in the order of slots, while combine_send waits for each."""
    slot_tiles = backend.group.size * backend.config.num_max_tokens_per_rank
    counter = torch.zeros(len(count) * slot_tiles, dtype=torch.int32, device="cuda")

    def compute() -> None:
        row = 0
        for slot, rows in enumerate(count):
            for m in range(rows):
                y[row], row = 1.0, row + 1
                counter[slot * slot_tiles + m] = 1
                time.sleep(0.001)

    experts = threading.Thread(target=compute)
    experts.start()
    backend.combine_send(y, handle, Signal(counter, 1, 1, slot_tiles, num_sms=2))
    experts.join()


def lost_hander(group: EPGroup, shape: Sequence) -> None:
    """Copies by node. The last rank is lost after a step: in the next one, what it was to hand on to its node and from
    there is missing, all others' shares are whole, and everybody names it; from then on the next rank of its node takes
    its work over."""
    backend = cases_low_latency.make(group, cases_low_latency.make_config(group, shape, timeout_s=1.5), num_sms=2)
    config, rank, lost = backend.config, group.rank, group.size - 1
    T, local = config.num_max_tokens_per_rank, config.num_slots // group.size
    x = torch.ones(T, config.hidden_size, dtype=torch.bfloat16, device="cuda")
    weights, generator = torch.ones(T, config.top_k, device="cuda"), torch.Generator().manual_seed(rank)
    node_of_slot = torch.tensor(group.node_of_rank).repeat_interleave(local)
    for turn in range(6):
        slots = torch.stack([torch.randperm(config.num_slots, generator=generator)[: config.top_k] for _ in range(T)])
        group.barrier()
        if turn >= 2 and rank == lost:
            continue
        handle, received = backend.dispatch(x, slots, weights)
        if turn == 2:
            expect_lost(backend, lost, "dispatch (counts)")
        y_TH = backend.combine(torch.ones_like(received.x_RH, dtype=torch.bfloat16), handle)
        is_missing = (slots // local == lost) & (turn >= 2)
        if turn == 2 and (rank - lost) % len(group.local_ranks) == 0:
            is_missing |= node_of_slot[slots] == group.node_of_rank[lost]
        outputs = config.top_k - is_missing.sum(1)
        assert torch.equal(y_TH.float(), outputs[:, None].float().expand(y_TH.shape)), (turn, y_TH[:, 0], outputs)
        assert backend.query_mask().tolist() == [int(r == lost and turn >= 2) for r in range(group.size)]
        backend.check()
    group.barrier()
    backend.close()


def late_to_hand_on(group: EPGroup, shape: Sequence, late_s: float) -> None:
    """The last rank is late between its sends and its receives: those that wait for what it hands on and sums charge
    it, and not the source."""
    backend = cases_low_latency.make(group, cases_low_latency.make_config(group, shape, timeout_s=60.0), num_sms=1)
    config, rank, late = backend.config, group.rank, group.size - 1
    T, local = config.num_max_tokens_per_rank, config.num_slots // group.size
    x = torch.ones(T, config.hidden_size, dtype=torch.bfloat16, device="cuda")
    slots = (torch.arange(T)[:, None] + torch.arange(config.top_k)) % group.size * local
    for late_in in (None, "dispatch", "combine"):
        group.barrier()
        backend.stats(reset=True)
        handle = backend.dispatch_send(x, slots, torch.ones(T, config.top_k))
        time.sleep(late_s * (rank == late and late_in == "dispatch"))
        y = torch.ones_like(backend.dispatch_recv(handle).x_RH, dtype=torch.bfloat16)
        group.barrier()
        backend.combine_send(y, handle)
        time.sleep(late_s * (rank == late and late_in == "combine"))
        backend.combine_recv(handle)
        group.barrier()
        stats = backend.stats()
        if late_in is None or rank == late:
            continue
        waited = dict(dispatch=stats.dispatch_wait_us_N, combine=stats.combine_wait_us_N)[late_in] / 1e6
        waits = late_in == "dispatch" and group.node == group.node_of_rank[late]
        waits |= late_in == "combine" and rank % len(group.local_ranks) == late % len(group.local_ranks)
        assert (late_s / 2 < waited[late] < late_s * 2) == waits, (rank, late_in, waited)
        assert max(w for r, w in enumerate(waited) if r != late) < late_s / 4, (rank, late_in, waited)
    backend.close()
