"""What every rank does under emulation, beside the cases of tests/gpu that need no stream and no second process."""

import random
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch

from eprt.compat.deep_ep.dispatch_layout import DispatchLayout
from eprt.compat.deep_ep.rows import RowExchange
from eprt.compat.deep_ep.rows_received import ReceivedRows
from eprt.ep.errors import EPTimeoutError
from eprt.ep.group.group import EPGroup
from tests.emulated.kernels import fast_clock
from tests.gpu import cases_low_latency, cases_normal, cases_normal_rows, fast_oracle
from tests.ranks.cases_ep import SKEWS, assert_same_bits, make_tokens
from tests.ranks.cases_late_rank import only_the_late_rank_is_charged
from tests.ranks.cases_set_up import only_set_up_waits_for_a_late_rank

WAYS = ("fused", "single", "ahead")


def calls_low_latency(group: EPGroup, shape: Sequence, num_sms: int) -> None:
    """All skews, by single calls, receives started ahead and two calls in one launch, differently on different ranks:
    the oracle's bits. shape: as in cases_low_latency.SHAPES."""
    rng = random.Random(7)
    backend = cases_low_latency.make(group, cases_low_latency.make_config(group, shape), num_sms=num_sms)
    for number, skew in enumerate(SKEWS * 2):
        everyone = cases_low_latency.one_round(make_tokens(rng, backend.config, group.size, skew))
        cases_low_latency.poison(backend)
        calls = WAYS[(number + number // len(SKEWS) * (1 + group.rank)) % len(WAYS)]
        cases_low_latency.check_once(backend, everyone, calls)
    backend.close()


def in_layers(group: EPGroup, of: Callable[..., None], **kwargs: Any) -> None:
    """A case between nodes, with a copy of a token for each node."""
    vars(group)["gpu_copies"] = "node"
    of(group, **kwargs)


def long_wait(group: EPGroup, shape: Sequence) -> None:
    """Statistics of many seconds that all wait for rank 0."""
    backend = cases_low_latency.make(group, cases_low_latency.make_config(group, shape, timeout_s=1e5))
    everyone = cases_low_latency.one_round(make_tokens(random.Random(3), backend.config, group.size, "uniform"))
    cases_low_latency.check_once(backend, everyone, "fused")
    group.barrier()
    with fast_clock(1000) if group.rank == 0 else nullcontext():
        group.barrier()
        if group.rank == 0:
            time.sleep(0.3)  # 300 s of its clock, of which crowded threads may miss most
        cases_low_latency.check_once(backend, everyone, "fused")
        group.barrier()
    waited_us = backend.stats().dispatch_wait_us_N[0]
    assert group.rank == 0 or waited_us > 10e6, waited_us
    backend.close()


def late_rank(group: EPGroup, mode: str, exact: bool) -> None:
    """The last rank but one, by seconds: beside them the emulation's own time is little."""
    cases: Any = {"low_latency": cases_low_latency, "normal": cases_normal}[mode]
    shape = (64, group.size if mode == "normal" else 1, min(4, group.size), group.size, "same", exact)
    backend = cases.make(group, cases.make_config(group, shape, timeout_s=60.0), num_sms=1)
    only_the_late_rank_is_charged(group, backend, late=group.size - 2, late_s=2.0)
    backend.close()


def calls_normal(group: EPGroup, shape: Sequence, num_sms: int) -> None:
    """The same of normal mode. shape: as in cases_normal.SHAPES."""
    rng = random.Random(8)
    config = cases_normal.make_config(group, shape)
    backend = cases_normal.make(group, config, num_sms=num_sms, expert_alignment=rng.choice([1, 24]))
    for number, skew in enumerate(cases_normal.SKEWS * 2):
        everyone = cases_normal.random_tokens(rng, config, group.size, skew)
        cases_normal.poison(backend)
        calls = WAYS[(number + number // len(cases_normal.SKEWS)) % len(WAYS)]
        cases_normal.check_once(backend, everyone, calls)
    backend.close()


def later_handle_first(group: EPGroup, shape: Sequence, num_sms: int) -> None:
    """Two handles in flight, of which the later is received first, with the call that does both phases: what warps have
    claimed of the one is not taken for the other's."""
    config, rank = cases_normal.make_config(group, shape), group.rank
    backend, rng = cases_normal.make(group, config, num_sms=num_sms), random.Random(6)
    for _ in range(4):
        both = [make_tokens(rng, config, group.size, "uniform") for _ in range(2)]
        cases_normal.poison(backend)
        first, second = (everyone[rank] for everyone in both)
        handle = backend.dispatch_send(first.x_TH, first.slot_idx_TK, first.topk_weights_TK)
        later, got_later = backend.dispatch(second.x_TH, second.slot_idx_TK, second.topk_weights_TK)
        got = backend.dispatch_recv(handle)
        wanted = [fast_oracle.received(rank, config, everyone) for everyone in both]
        for received, want in zip((got, got_later), wanted):
            assert_same_bits(received.x_RH.view(torch.uint8), want.x.view(torch.uint8), "x_RH")
        for of, everyone, want in zip((handle, later), both, wanted):
            y_TH = backend.combine(fast_oracle.outputs(rank, config, want), of)
            assert_same_bits(y_TH, fast_oracle.combined(rank, config, everyone), "y_TH")
        cases_normal.check_once(backend, make_tokens(rng, config, group.size, "uniform"), "fused")
    backend.close()


def token_rows(group: EPGroup, shape: Sequence, num_sms: int) -> None:
    """Rows per token, again, back, with biases and weights, without experts."""
    cases_normal.poison_new_tensors()
    exchange = RowExchange(group, 1 << 23, timeout_s=60.0, num_sms=num_sms)
    rng, in_vain = random.Random(9), cases_normal_rows.watch_launches_ahead(exchange)
    for skew in cases_normal.SKEWS:
        exchange.kernels.memory.view(exchange.kernels.data_begin, (1 << 23,), torch.uint8).fill_(0xFF)
        cases_normal_rows.rows_once(group, exchange, rng, shape, skew)
    cases_normal_rows.check_launches_ahead(group, in_vain)
    exchange.close()


def after_weeks(group: EPGroup, shape: Sequence, mode: str, num_calls: int) -> None:
    """A server that has run for weeks (num_calls), and a place in memory that no batch has needed before: what lies
    there is epoch 0. Rank 0 is late, so that the others wait."""
    cases: Any = {"low_latency": cases_low_latency, "normal": cases_normal}[mode]
    backend = cases.make(group, cases.make_config(group, shape), num_sms=3)
    tickets = torch.tensor([1024, 1024, 1][: len(backend.kernels._ticket)])
    backend.kernels._ticket.copy_(tickets * num_calls)
    for calls in WAYS * 2:
        everyone = cases_low_latency.one_round(make_tokens(random.Random(3), backend.config, group.size, "uniform"))
        cases.poison(backend)
        group.barrier()
        time.sleep(0.03 * (group.rank == 0))
        cases.check_once(backend, everyone, calls)
    backend.close()


def layouts(group: EPGroup) -> None:
    """Call after call with the same Layout, which keeps totals between them: what torch counts. Some experts do not
    exist."""
    generator = torch.Generator().manual_seed(group.rank)
    num_experts = 6 * group.size
    layout = DispatchLayout(group.size, num_experts)
    for num_tokens, top_k, dtype in [
        (300, 8, torch.int64),
        (0, 3, torch.int32),
        (1, 1, torch.int64),
        (257, 10, torch.int32),
        (256, 2, torch.int64),
        (9000, 1, torch.int32),
    ]:
        expert_TK = torch.randint(-2, num_experts + 2, (num_tokens, top_k), generator=generator, dtype=dtype)
        valid_TK = (expert_TK >= 0) & (expert_TK < num_experts)
        rank_TK = torch.where(valid_TK, expert_TK // 6, group.size).long()
        in_rank_TR = torch.zeros(num_tokens, group.size + 1, dtype=torch.bool).scatter(1, rank_TK, True)[:, :-1]
        per_rank, per_expert, in_rank = layout(expert_TK)
        assert torch.equal(in_rank, in_rank_TR)
        assert torch.equal(per_rank, in_rank_TR.sum(0, dtype=torch.int32))
        assert torch.equal(per_expert.long(), expert_TK[valid_TK].long().bincount(minlength=num_experts))
    layout.close()


def late_second_launch(group: EPGroup) -> None:
    """Rank 1 gets more rows than it guessed, and its host is late to launch again: both ranks name each other at the
    deadline, their epochs stay in step, and once nobody is masked all rows come."""
    exchange, rank = RowExchange(group, 1 << 23, timeout_s=1.5), group.rank
    num_tokens = (200, 2)[rank]
    x_TH = torch.full((num_tokens, 64), float(1 + rank), dtype=torch.bfloat16, device="cuda")
    to_rank_1 = torch.ones(num_tokens, 1, dtype=torch.int64, device="cuda")
    weights = torch.ones(num_tokens, 1, device="cuda")
    finish_dispatch = exchange._finish_dispatch

    def finish_slowly(*args: Any) -> bool:
        time.sleep(4 * rank)
        return finish_dispatch(*args)

    def dispatch() -> ReceivedRows:
        return exchange.dispatch(x_TH, num_experts=2, topk_idx_TK=to_rank_1, topk_weights_TK=weights)

    with patch.object(exchange, "_finish_dispatch", finish_slowly):
        try:
            dispatch()
            raise AssertionError("no deadline")
        except EPTimeoutError as error:
            where = "where its rows go" if rank == 0 else "tokens"
            assert f"[rank {rank}/2] waited 1.5 s for rank {1 - rank} in dispatch ({where})" in str(error), error
    assert exchange.kernels.mask.tolist() == [rank, 1 - rank]
    group.barrier()
    exchange.kernels.mask.zero_()
    group.barrier()
    x_NH = dispatch().x_NH
    assert x_NH[:, 0].tolist() == ([1.0] * 200 + [2.0] * 2 if rank else [])
    exchange.close()


def late_while_setting_up(group: EPGroup, mode: str) -> None:
    """By three times a deadline that is long beside the emulation's own time."""
    cases: Any = {"low_latency": cases_low_latency, "normal": cases_normal}[mode]
    shape = (64, group.size if mode == "normal" else 1, min(4, group.size), group.size, "same", False)
    backend = cases.make(group, cases.make_config(group, shape, timeout_s=1.0), num_sms=1)
    only_set_up_waits_for_a_late_rank(group, backend, late_s=3.0)
    backend.set_deadline(9.0, "EPRT_SET_UP_TIMEOUT_S")
    backend.kernels.failure.words[:] = (2, 0, 3, 4)
    with pytest.raises(EPTimeoutError, match=r"waited 9\.0 s for rank 0 in dispatch \(tokens\).*EPRT_SET_UP_TIMEOUT_S"):
        backend.check()
    backend.close()
