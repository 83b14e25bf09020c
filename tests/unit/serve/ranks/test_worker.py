"""A rank's loop: messages, reports, signals between any two instructions, and errors told in one line."""

import sys
from collections.abc import Callable
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from eprt.engine.outputs import EngineStats, HandoffEvent, StepResult, TokenOutput
from eprt.engine.sampling_params import SamplingParams
from eprt.ep.config import EPConfig
from eprt.ep.exchange import Exchange
from eprt.ep.group.group import EPGroup
from eprt.ep.migration.job import MigrationJob
from eprt.ep.registry import make_backend
from eprt.kv.reader import HeldPages, PageSource
from eprt.serve.ranks import worker
from eprt.serve.ranks.messages import (
    AbortRequest,
    AddRequest,
    Adopt,
    Arrived,
    AskRouting,
    BrokenInvariant,
    CancelMigration,
    ForgetSource,
    Held,
    Migrate,
    Ping,
    Pong,
    RoutingReply,
    StartAdopted,
    StepReport,
    Stop,
    Wake,
)
from eprt.serve.ranks.worker import Worker, _describe, _fatal


class GivenChannel:
    """Gives each batch of messages in turn; keeps what is sent."""

    def __init__(self, *batches: list, stop_reasons: tuple[str, ...] = ()):
        self.batches, self.stop_reasons, self.was_woken = list(batches), list(stop_reasons), False
        self.sent: list = []

    def receive(self, timeout_s: float | None) -> list:
        return self.batches.pop(0) if self.batches else []

    def send(self, message) -> None:
        self.sent.append(message)

    def add_waker(self) -> Callable[[], None]:
        return lambda: None


class GivenEngine:
    """Gives each result in turn, then idles; knows the numbers that its steps were called with."""

    def __init__(self, *results: StepResult):
        self.results, self.seen, self.added, self.aborted = list(results), [], [], []
        self.model = SimpleNamespace(exchange=Exchange({}))
        self.migrator, self.step_waits = Mock(active=False), None
        self.deferred = Mock(**{"take_end.return_value": False})
        self.membership = SimpleNamespace(deferred=self.deferred)
        self.handoff, self.intake = Mock(source=None, **{"advance.return_value": []}), Mock()
        self.recorder = SimpleNamespace(
            sample=lambda: np.array([[[1], [2]]], np.int8), sample_steps=lambda: np.array([5, 6])
        )

    def add_request(self, request_id, prompt_token_ids, params, *, sample_idx, generated, hands_over) -> None:
        if not prompt_token_ids:
            raise ValueError("the prompt is empty")
        self.added.append((request_id, sample_idx))

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)

    def step(self, seen_seq: int) -> StepResult:
        self.seen.append(seen_seq)
        return self.results.pop(0) if self.results else StepResult([], all_idle=True)

    def stats(self) -> EngineStats:
        return EngineStats(0, len(self.seen), 0, 0, 0, 0, 0, 0, 0, 0, 0.0)

    def check_integrity(self) -> None:
        raise RuntimeError("page 7 has no owner")


def run(channel: GivenChannel, engine: GivenEngine) -> None:
    Worker(engine, channel, window_s=1).run()  # type: ignore[arg-type]


def test_messages_reach_the_engine_and_outputs_the_frontend():
    output, job = TokenOutput("1", 7), MigrationJob(4, 0, (), {}, (), timeout_s=1.0)
    channel = GivenChannel(
        [AddRequest(1, "1", [5], SamplingParams(), 2), Wake(2)],
        [AbortRequest("1"), CancelMigration(4), AskRouting(), Ping()],
        [Migrate(3, job)],
        [Stop(4)],
    )
    engine = GivenEngine(StepResult([output], all_idle=False), StepResult([], all_idle=False))
    run(channel, engine)
    assert engine.added == [("1", 2)] and engine.aborted == ["1"] and engine.seen == [2, 3, 4]
    engine.migrator.offer.assert_called_once_with(job)
    engine.migrator.cancel.assert_called_once_with(4)
    replies = [message for message in channel.sent if isinstance(message, RoutingReply)]
    assert replies == [RoutingReply((1, 2, 1), 1, bytes([1, 2]), np.array([5, 6]).tobytes())]
    assert channel.sent.count(Pong()) == 1
    reports = [message for message in channel.sent if isinstance(message, StepReport)]
    assert reports[0].outputs == [output] and reports[0].stats is not None, "the first step reports its statistics"
    assert reports[-1].outputs == [] and reports[-1].stats is not None, "an idle rank reports its statistics"


def test_a_request_that_the_engine_refuses_ends_with_the_reason():
    channel = GivenChannel([AddRequest(1, "1", [], SamplingParams())], [Stop(2)])
    run(channel, GivenEngine(StepResult([], all_idle=False)))
    (refused,) = channel.sent[0].outputs
    assert (refused.finish_reason, refused.error, refused.token_id) == ("abort", "the prompt is empty", -1)


def test_a_rank_sleeps_until_a_number_and_checks_itself_once_it_is_quiet():
    engine = GivenEngine()
    channel = GivenChannel([AbortRequest("old")], [], [Wake(1)], [], [Stop(2)])
    run(channel, engine)
    assert engine.seen == [1, 2] and engine.aborted == ["old"], "an abort wakes nobody into a step"
    assert channel.sent[0] == BrokenInvariant("page 7 has no owner")


def test_a_rank_that_was_told_to_stop_leaves_when_all_are_idle():
    engine = GivenEngine(*[StepResult([], all_idle=False)] * 3)
    run(GivenChannel([Stop(1)]), engine)
    assert engine.seen == [1] * 4


def _told_with_a_signal_at(instruction: int) -> tuple[list[str], bool]:
    """What the frontend hears of in two rounds, and whether the second signal came in the first of them."""
    channel = GivenChannel(stop_reasons=("SIGTERM",))
    loop = Worker(GivenEngine(), channel, window_s=1)  # type: ignore[arg-type]
    left = instruction

    def trace(frame, event, _):
        nonlocal left
        if frame.f_code is not Worker._handle_messages.__code__:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            left -= 1
            if left == 0:
                channel.stop_reasons.append("SIGINT")
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        loop._handle_messages([])
    finally:
        sys.settrace(before)
    loop._handle_messages([])
    return [message.reason for message in channel.sent], left <= 0


def test_no_signal_is_lost_whenever_it_comes():
    instruction, came = 1, True
    while True:
        told, came = _told_with_a_signal_at(instruction)
        if not came:
            break
        assert told == ["SIGTERM", "SIGINT"], f"SIGINT at instruction {instruction}"
        instruction += 1
    assert instruction > 10, "nothing was traced: the test proves nothing"


@pytest.mark.parametrize("take", [lambda: torch.empty(1 << 55), lambda: np.empty(1 << 55)], ids=["torch", "numpy"])
def test_memory_that_is_not_there_is_one_line_with_the_flags(take):
    with pytest.raises((RuntimeError, MemoryError)) as caught:
        take()
    told = _describe(caught.value)
    assert "\n" not in told and "llocate" in told and "lower --chunk-size, " in told, told
    assert _describe(MemoryError("lower --kv-cache-gb")) == "lower --kv-cache-gb"
    assert _describe(torch.OutOfMemoryError("CUDA out of memory. Tried")).startswith("CUDA out of memory. Tried; take")
    assert "RuntimeError: a defect" in _describe(RuntimeError("a defect"))


@pytest.mark.parametrize("rank", [0, 1])
def test_faults_on_purpose_reach_recorded_steps(rank):
    """A replayed graph calls no backend: with faults, steps are launched anew, on all ranks alike."""
    config = EPConfig(16, 4, 2, 4, dtype=torch.float32)
    group, backend = SimpleNamespace(rank=rank, size=2), make_backend("local", config, EPGroup.single())
    engine = SimpleNamespace(
        group=group,
        model=SimpleNamespace(exchange=Exchange({"low_latency": backend})),
        runner=SimpleNamespace(graphs="recorded"),
        drafter=SimpleNamespace(graphs="recorded"),
    )
    with worker.inject(["late-compute:0:2ms"], engine):
        assert (engine.model.exchange["low_latency"] is backend) == (rank == 1)
    assert engine.runner.graphs is None and engine.drafter.graphs is None


def test_a_rank_that_died_is_named_by_who_noticed():
    from eprt.ep.errors import EPError, RankLostError

    assert _fatal(RankLostError(0, 4, 2, "dispatch")).lost_rank == 2
    assert _fatal(EPError("no memory")).lost_rank is None and _fatal(ValueError("x")).message == "x"


def test_requests_between_instances_reach_the_engine_and_what_becomes_of_them_the_frontend():
    held = HeldPages(PageSource("memory", "p", 1, ()), [4], [5])
    add = AddRequest(0, "1", [5], SamplingParams(), generated=[6])
    channel = GivenChannel([Adopt(add, held)], [StartAdopted(1, "1")], [ForgetSource("p"), Stop(2)])
    engine = GivenEngine(StepResult([], all_idle=False))
    engine.handoff.advance.side_effect = [
        [HandoffEvent("2", held=held)],
        [HandoffEvent("1", num_pulled=1)],
        [HandoffEvent("3", error="damaged")],
        *[[]] * 9,
    ]
    run(channel, engine)
    engine.intake.offer_request.assert_called_once_with("1", [5], add.params, 0, [6], held)
    engine.handoff.start_request.assert_called_once_with("1")
    engine.handoff.forget_source.assert_called_once_with("p")
    assert engine.seen == [2, 2], "pages that arrive wake nobody into a step"
    told = [message for message in channel.sent if isinstance(message, Held | Arrived)]
    assert told == [Held("2", held), Arrived("1", 1), Arrived("3", 0, "damaged")]


def test_an_offer_that_the_engine_refuses_is_answered():
    held = HeldPages(PageSource("memory", "p", 1, ()), [], [])
    channel = GivenChannel([Adopt(AddRequest(0, "1", [5], SamplingParams()), held)], [Stop(1)])
    engine = GivenEngine()
    engine.intake.offer_request.side_effect = ValueError("other pages")
    run(channel, engine)
    assert Arrived("1", 0, "other pages") in channel.sent


def test_a_sleeping_rank_looks_for_pages_when_it_is_woken():
    """A waker brings no message: the rank must not take the silence for rest."""
    channel = GivenChannel([], [Stop(1)])
    channel.was_woken = True
    engine = GivenEngine()
    engine.handoff.advance.side_effect = [[HandoffEvent("1", num_pulled=1)], *[[]] * 9]
    run(channel, engine)
    assert channel.sent[0] == Arrived("1", 1), "before the next message, and without a check of integrity"
