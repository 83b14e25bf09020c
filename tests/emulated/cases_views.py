"""What every rank does under emulation when one of them is lost amid a call, and the others go on without it."""

import random
import threading
import time
from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import pytest
import torch

from eprt.ep.errors import RankLostError, ViewChangedError
from eprt.ep.group.group import EPGroup
from eprt.ep.group.loss_watch import LossWatch
from eprt.ep.group.view import View
from eprt.ep.reference import SentTokens
from tests.gpu import cases_low_latency, cases_normal
from tests.ranks.cases_ep import make_tokens

WAYS = ("fused", "single", "ahead")
_CASES: dict[str, Any] = {"low_latency": cases_low_latency, "normal": cases_normal}


def without(everyone: Sequence[SentTokens], lost: int, slots_per_rank: int) -> list[SentTokens]:
    """The lost rank has no tokens, and nobody has one for it."""
    left = []
    for rank, tokens in enumerate(everyone):
        slots = torch.where(tokens.slot_idx_TK // slots_per_rank == lost, -1, tokens.slot_idx_TK)
        T = 0 if rank == lost else len(slots)
        left.append(SentTokens(tokens.x_TH[:T], slots[:T].contiguous(), tokens.topk_weights_TK[:T]))
    return left


class ViewCase:
    """A rank's backend, and calls whose tokens all ranks know."""

    def __init__(self, group: EPGroup, shape: Sequence, mode: str):
        self.cases, self.group, self._random = _CASES[mode], group, random.Random(11)
        # Past any wait of this test: no deadline of a kernel ends one.
        self.backend = self.cases.make(group, self.cases.make_config(group, shape, timeout_s=100.0), num_sms=3)

    def tokens(self) -> list[SentTokens]:
        config = self.backend.config
        return cases_low_latency.one_round(make_tokens(self._random, config, self.group.size, "uniform"))

    def check(self, calls: str, lost: int | None = None) -> None:
        everyone, size = self.tokens(), self.group.size
        if lost is not None:
            everyone = without(everyone, lost, self.backend.config.num_slots // size)
        if self.group.rank != lost:
            self.cases.poison(self.backend)
            self.cases.check_once(self.backend, everyone, calls)

    def enter(self, view: View) -> None:
        """As the server's ranks do: each of the view's restarts when nothing is under way on any, above all epochs."""
        epochs = self.group.allgather(self.backend.epoch)
        self.group.view = view
        if view.alive[self.group.rank]:
            self.backend.restart(max(epoch for rank, epoch in enumerate(epochs) if view.alive[rank]) + 1)
        self.group.barrier()


def lost_amid_a_call(group: EPGroup, shape: Sequence, mode: str, phase: str) -> None:
    """Rank 1 sends and goes no further, or does not even send. A thread ends the others' waits, in kernels without a
    deadline; what they computed counts no more. They go on without it, and later with it; every result is right."""
    case, lost = ViewCase(group, shape, mode), 1
    backend, size = case.backend, group.size
    for calls in WAYS:
        case.check(calls)
    alive = tuple(rank != lost for rank in range(size))
    everyone, is_lost = case.tokens(), threading.Event()
    mine = everyone[group.rank]
    routed = mine.x_TH, mine.slot_idx_TK, mine.topk_weights_TK
    ended: list[Sequence[int]] = []
    with (
        patch.object(group, "lost_ranks", lambda: (lost,) if is_lost.is_set() and group.view.alive[lost] else ()),
        patch.object(group, "wait_ended", ended.append),
    ):
        watch = LossWatch(group, backend.halt)
        if group.rank == lost:
            if phase == "combine":
                backend.dispatch_send(*routed)
        else:
            threading.Timer(0.2, is_lost.set).start()
            with pytest.raises(RankLostError, match=f"rank {lost} died during a step"):
                handle, received = backend.dispatch(*routed)
                y = torch.zeros(received.x_RH.shape, dtype=torch.bfloat16, device="cuda")
                backend.combine(y, handle)
                backend.check()
            assert backend.query_mask().tolist() == [int(rank != group.rank) for rank in range(size)]
        case.enter(View(1, alive))
        assert ended == [[lost]] * (group.rank != lost)
        for calls in WAYS * 2:
            case.check(calls, lost)
        backend.halt(ViewChangedError("of a view that is over"), 0)
        backend.check()
        is_lost.clear()
        case.enter(View.full(size))
        assert ended == [[lost]] * (group.rank != lost)  # nothing was halted: nobody's end is awaited
        for calls in WAYS * 2:
            case.check(calls)
        watch.close()
    group.barrier()
    backend.close()


def begins_alone(group: EPGroup, shape: Sequence, mode: str) -> None:
    """A rank that joins computes by itself at first: it waits for nobody, and nobody gets anything from it."""
    group.view = View.alone(group.rank, group.size)
    case = ViewCase(group, shape, mode)
    backend, config = case.backend, case.backend.config
    started = time.monotonic()
    slots_per_rank = config.num_slots // group.size
    mine = case.tokens()[group.rank]
    own = torch.where(mine.slot_idx_TK // slots_per_rank == group.rank, mine.slot_idx_TK, -1)
    for _ in range(3):
        handle = backend.dispatch_send(mine.x_TH, mine.slot_idx_TK, mine.topk_weights_TK)
        received = backend.dispatch_recv(handle)
        assert int(received.recv_count_E.sum()) == int((own >= 0).sum())
        backend.combine_send(torch.zeros(received.x_RH.shape, dtype=torch.bfloat16, device="cuda"), handle)
        backend.combine_recv(handle)
    assert time.monotonic() - started < 60
    group.barrier()
    case.enter(View(1, (True,) * group.size))
    for calls in WAYS:
        case.check(calls)
    backend.close()
