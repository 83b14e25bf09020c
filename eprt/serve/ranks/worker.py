"""Worker: a rank's loop: read what the frontend sent, step the engine together with the other ranks, report.

Knows the engine and the channel; nothing of HTTP, text or other ranks' requests.
"""

import contextlib
import logging
import os
import signal
import time
import traceback
from collections.abc import Callable, Sequence
from typing import NoReturn

from eprt.engine.outputs import HandoffEvent, StepResult, TokenOutput
from eprt.ep.group.current_wait import CurrentWait
from eprt.serve.options import OptionError, ServeOptions
from eprt.serve.ranks import messages as msg
from eprt.serve.ranks.channel import Channel, FrontendLostError
from eprt.serve.ranks.heartbeat import HeartbeatThread
from eprt.serve.ranks.start_engine import load, tell_ready
from eprt.serve.ranks.usage_meter import UsageMeter
from eprt.serve.ranks.wait_totals import wait_totals

_log = logging.getLogger(__name__)

# SIGUSR1 is among them because mpirun forwards it to all ranks, and does not forward SIGTERM (docs/operations.md).
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)

_LESS_MEMORY = (
    "take more ranks, or lower --chunk-size, --max-num-seqs, --low-latency-max-tokens, --spare-experts, "
    "--num-redundant-experts or --kv-cache-gb"
)

# How often counters go to the frontend; at least four times in a window of the diagnosis.
_STATS_PERIOD_S = 0.5
_QUIET_BEFORE_CHECK_S = 1.0


class Worker:
    """Runs one rank's engine until the frontend says Stop, or until FrontendLostError.

    Args:
        window_s: of the diagnosis.
        survives: whether the others go on where a rank is lost; else its loss ends run() with RankLostError.
        usage: what is told with the waits.
    """

    def __init__(
        self, engine, channel: Channel, window_s: float, survives: bool = False, usage: UsageMeter | None = None
    ):
        self._engine, self._channel, self._usage = engine, channel, usage
        self.asleep = True  # waits for requests, or for the frontend: in no step
        self._stats_period_s = min(_STATS_PERIOD_S, window_s / 4)
        self._seen_seq = 0
        self._stopping = False
        self._next_stats_s = 0.0
        self._was_migrating = False
        self._survives = survives
        self._early: list[msg.ToRank] = []  # that arrived amid a step
        self._suspend: msg.Suspend | None = None  # to be done now
        self._resume: msg.Resume | None = None
        self._go: msg.Go | None = None
        self._boundary: msg.Suspend | None = None  # to be done when all ranks know of it
        self._view = 0  # number of the latest view that this rank was told of
        engine.handoff.wake = engine.membership.deferred.wake = channel.add_waker()
        if survives:
            engine.group.interrupt = self._look_for_suspend
            engine.membership.watch_losses()

    def run(self) -> bool:
        """Whether all ranks have left together; False: this one alone."""
        asleep = True
        while True:
            if self._suspend is not None:
                if not self._change_view():
                    return False
                asleep = False
            if asleep:
                asleep = not self._sleep()
                continue
            self._handle_messages(self._receive(0))
            if self._suspend is not None:
                continue
            result = self._step()
            if result is None:
                self._wait_for_suspend()
                continue
            self._report(result.outputs, idle=result.all_idle)
            if result.leaves:
                self._suspend, self._boundary = self._suspend or self._boundary, None
            # All ranks have seen the Stop that this one has seen, and none has work: all leave in the same step.
            if result.all_idle and self._stopping:
                return True
            asleep = result.all_idle

    def _step(self) -> StepResult | None:
        """None where the step was broken off: another rank is gone."""
        if not self._survives:
            return self._engine.step(self._seen_seq)
        from eprt.ep.errors import EPTimeoutError, RankLostError, ViewChangedError

        try:
            return self._engine.step(self._seen_seq)
        except ViewChangedError:
            pass  # by _look_for_suspend
        except RankLostError as error:
            self._channel.send(msg.Lost(error.lost, False, str(error)))
        except EPTimeoutError as error:
            self._channel.send(msg.Lost(error.peer, True, str(error)))
        return None

    def _receive(self, timeout_s: float | None) -> list[msg.ToRank]:
        """What has arrived, amid a step too."""
        early, self._early = self._early, []
        self.asleep = timeout_s != 0
        messages = self._channel.receive(0 if early else timeout_s)
        self.asleep = False
        return early + messages

    def _sleep(self) -> bool:
        """Blocks until the frontend numbers a new request (True), or something smaller has happened (False)."""
        seen_seq = self._seen_seq
        messages = self._receive(_QUIET_BEFORE_CHECK_S)
        if not (messages or self._channel.stop_reasons or self._channel.was_woken):
            self._check_integrity()
            messages = self._receive(None)
        self._handle_messages(messages)
        if self._seen_seq > seen_seq:
            return True
        if self._engine.handoff.source is not None:  # pages come and go while no step is taken
            self._channel.send(msg.StepReport([], self._engine.stats()))
        return False

    def _handle_messages(self, messages: list[msg.ToRank]) -> None:
        for message in messages:
            match message:
                case msg.AddRequest():
                    self._add_request(message)
                    self._seen_seq = message.seq
                case msg.Adopt():
                    self._adopt_request(message)
                case msg.StartAdopted(seq, request_id):
                    self._engine.handoff.start_request(request_id)
                    self._seen_seq = seq
                case msg.ForgetSource(owner):
                    self._engine.handoff.forget_source(owner)
                case msg.Wake(seq):
                    self._seen_seq = seq
                case msg.AbortRequest(request_id):
                    self._engine.abort(request_id)
                case msg.Migrate(seq, job):
                    self._seen_seq = seq
                    self._engine.migrator.offer(job)
                case msg.CancelMigration(job_id):
                    self._engine.migrator.cancel(job_id)
                case msg.AskRouting():
                    sample_LAK = self._engine.recorder.sample()
                    steps = self._engine.recorder.sample_steps().tobytes()
                    reply = msg.RoutingReply(sample_LAK.shape, sample_LAK.itemsize, sample_LAK.tobytes(), steps)
                    self._channel.send(reply)
                case msg.Ping():
                    self._channel.send(msg.Pong())
                case msg.Stop(seq):
                    self._seen_seq, self._stopping = seq, True
                case msg.Suspend(view, _, after_seq):
                    if after_seq is None:
                        self._suspend = message
                    else:
                        self._boundary, self._seen_seq = message, after_seq
                        self._engine.leave_at_boundary(view)
                case msg.Resume():
                    self._resume = message
                case msg.LoadExperts(view, rows):
                    if view == self._view and self._suspend is None:
                        self._engine.membership.deferred.begin(rows)
                case msg.Go():
                    self._go = message
                case msg.Refused(reason):
                    raise OptionError(reason)
        if self._engine.membership.deferred.take_end():
            self._channel.send(msg.ExpertsLoaded(self._view))
        for event in self._engine.handoff.advance():
            self._channel.send(_handoff_message(event))
        # One by one: a signal may append another between any two instructions.
        while self._channel.stop_reasons:
            self._channel.send(msg.Drain(self._channel.stop_reasons.pop(0)))

    # -- from one view to the next --

    def _look_for_suspend(self) -> None:
        """Called now and then while this rank waits for others, of which one may be gone."""
        from eprt.ep.errors import ViewChangedError

        messages = self._channel.receive(0)
        self._early += messages
        for message in messages:
            if isinstance(message, msg.Suspend) and message.after_seq is None:
                raise ViewChangedError(f"view {message.view} is to come")

    def _wait_for_suspend(self) -> None:
        while self._suspend is None:
            self._handle_messages(self._receive(None))

    def _change_view(self) -> bool:
        """Suspends, resumes and goes on, as the frontend says; False where this rank takes no part any more."""
        while True:
            if (suspend := self._suspend) is not None:
                self._suspend = self._boundary = None
                self._view = suspend.view
                if not suspend.alive[self._engine.group.rank]:
                    return False
                self._report_suspended(suspend)
                alive = suspend.alive
            elif (resume := self._resume) is not None and resume.view == self._view:
                self._resume = None
                self._enter_view(resume, alive)
            elif (go := self._go) is not None and go.view == self._view:
                self._go, self._seen_seq = None, max(self._seen_seq, go.seq)
                return True
            else:
                self._handle_messages(self._receive(None))

    def _report_suspended(self, suspend: msg.Suspend) -> None:
        state = self._engine.suspend()
        if state.outputs:
            self._channel.send(msg.StepReport(list(state.outputs)))
        rows = [list(row) for row in state.expert_of_slot]
        self._channel.send(msg.Suspended(suspend.view, rows, state.epoch, state.placement_epoch))

    def _enter_view(self, resume: msg.Resume, alive: list[bool]) -> None:
        from eprt.ep.errors import RankLostError
        from eprt.ep.group.view import View

        group = self._engine.group
        for rank, pid in enumerate(resume.pids):
            if alive[rank] and rank != group.rank:
                group.watch(rank, pid)
        view = View(resume.view, tuple(alive))
        try:
            self._engine.enter_view(view, resume.rows, resume.epoch, resume.placement_epoch, resume.lacks_experts)
        except RankLostError as error:  # another view is to come
            self._channel.send(msg.Lost(error.lost, False, str(error)))
            return
        self._channel.send(msg.Resumed(resume.view))

    # -- to the engine and from it --

    def _add_request(self, message: msg.AddRequest) -> None:
        try:
            self._engine.add_request(
                message.request_id,
                message.prompt_token_ids,
                message.params,
                sample_idx=message.sample_idx,
                generated=message.generated,
                hands_over=message.hands_over,
            )
        except (ValueError, RuntimeError) as error:
            refused = TokenOutput(message.request_id, token_id=-1, finish_reason="abort", error=str(error))
            self._channel.send(msg.StepReport([refused]))

    def _adopt_request(self, message: msg.Adopt) -> None:
        new = message.request
        try:
            self._engine.intake.offer_request(
                new.request_id, new.prompt_token_ids, new.params, new.sample_idx, new.generated, message.held
            )
        except ValueError as error:
            self._channel.send(msg.Arrived(new.request_id, error=str(error)))

    def _report(self, outputs: list[TokenOutput], idle: bool) -> None:
        now_s = time.monotonic()
        migrator = self._engine.migrator
        migrating = migrator is not None and migrator.active
        wants_stats = idle or now_s >= self._next_stats_s or migrating != self._was_migrating
        self._was_migrating = migrating
        if wants_stats:
            self._next_stats_s = now_s + self._stats_period_s
            self._channel.send(msg.StepReport(outputs, self._engine.stats(), self._waits()))
        elif outputs:
            self._channel.send(msg.StepReport(outputs))

    def _waits(self) -> msg.WaitTotals | None:
        return wait_totals(self._engine, self._usage)

    def _check_integrity(self) -> None:
        """No request runs on any rank: every page, row and request must be accounted for."""
        try:
            self._engine.check_integrity()
        except RuntimeError as error:
            self._channel.send(msg.BrokenInvariant(str(error)))


def _handoff_message(event: HandoffEvent) -> msg.Held | msg.Arrived:
    if event.held is not None:
        return msg.Held(event.request_id, event.held)
    return msg.Arrived(event.request_id, event.num_pulled, event.error)


def inject(faults: Sequence[str], engine):
    """Puts this rank's faults, if any, between the engine and its communication until the returned context ends."""
    from eprt.diagnostics.inject import Injector

    group = engine.group
    injector = Injector(faults, group.rank, group.size)
    engine.model.exchange.wrap(injector.wrap)  # in all layers: they share it
    for fault in injector.faults:
        _log.warning("[rank %d/%d] a fault on purpose: %s", group.rank, group.size, fault)
    if engine.runner.graphs is not None:
        for computes in filter(None, (engine.runner, engine.drafter)):
            computes.graphs = None
        _log.warning("[rank %d/%d] steps are not replayed: recorded steps have no faults", group.rank, group.size)
    return injector


def beat_while_loading(channel: Channel, current_wait: Callable[[], CurrentWait | None]) -> HeartbeatThread:
    """A rank's heartbeats until it is Ready, for serve(). From the connection on: any step may get stuck."""
    return HeartbeatThread(channel, lambda: False, (current_wait,))


def serve(
    options: ServeOptions, group, channel: Channel, first_rank: int = 0, loading: HeartbeatThread | None = None
) -> None:
    """Loads and serves; returns when all ranks have left together. FrontendLostError is for the caller to report; any
    other error goes to the frontend, which prints it once, and ends this process with status 1. first_rank: as load()
    has it. loading: the heartbeats so far; it ends them."""
    try:
        engine = load(options, group, channel, first_rank)
        if loading is not None:
            loading.close()
        tell_ready(engine, channel)
        channel.catch_signals(STOP_SIGNALS)
        with inject(options.inject, engine) if options.inject else contextlib.nullcontext():
            usage = UsageMeter(engine)
            worker = Worker(engine, channel, options.diagnose_window_s, options.max_lost_ranks > 0, usage)
            of_team = () if engine.team is None else (engine.team.current_wait,)
            waits = (lambda: group.current_wait, engine.model.exchange.current_wait, *of_team)
            with HeartbeatThread(channel, lambda: worker.asleep, waits, usage.sample_clock):
                all_left = worker.run()
        channel.send(msg.Bye())
        channel.send_rest(timeout_s=5)
        if not all_left:
            os._exit(0)  # nobody meets a rank that leaves alone in a collective clean-up
        engine.close()
    except (FrontendLostError, OptionError):
        raise
    except Exception as error:
        fail(error, channel)


def fail(error: Exception, channel: Channel) -> NoReturn:
    """Ends this process with status 1, once the frontend has heard why."""
    with contextlib.suppress(FrontendLostError):
        channel.send(_fatal(error))
        # mpirun ends all processes when this one exits, and drops what the frontend has not printed by then.
        channel.wait_closed(timeout_s=5)
    # No collective clean-up: the other ranks may be waiting for this one; mpirun ends them.
    os._exit(1)


def _fatal(error: Exception) -> msg.Fatal:
    from eprt.ep.errors import EPTimeoutError, RankLostError

    if isinstance(error, EPTimeoutError):
        return msg.Fatal(_describe(error), error.peer, hung=True)
    return msg.Fatal(_describe(error), error.lost if isinstance(error, RankLostError) else None)


def _describe(error: Exception) -> str:
    """One line for what a user can mend; the traceback for what only a developer can."""
    import torch

    from eprt.ep.errors import EPError

    if isinstance(error, torch.OutOfMemoryError) or "allocate memory" in str(error):  # torch's words on GPUs and CPUs
        return f"{str(error).splitlines()[0]}; {_LESS_MEMORY}"
    if isinstance(error, MemoryError) and not str(error).count("--"):
        return f"{error or 'no memory'}; {_LESS_MEMORY}"
    if isinstance(error, (EPError, ValueError, OSError, MemoryError)):
        return str(error) or repr(error)
    return "".join(traceback.format_exception(error)).rstrip()
