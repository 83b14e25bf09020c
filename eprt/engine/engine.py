"""Engine: one rank's requests, and the step that all ranks take together.

Attention is data parallel: a request and its KV pages live on one rank from arrival to end. Experts are shared: every
forward pass exchanges tokens between all ranks, so all ranks must take every step, also those without a request.

A step

    schedule   this rank chooses its tokens (scheduler.py); no other rank is asked
    agree      the ranks all-gather a header of integers each (step_headers.py):
                   number of tokens | all decodes and few enough for low latency | has work | seen_seq | help sought |
                   time of arrival and since the last exchange, which tell which rank is late (step_waits.py) |
                   offered, progress and room of a migration of experts (ep/migration/migrator.py) |
                   number of the view for which this rank shall stop
               the mode is "low_latency" if every rank wishes so, else "normal"; if no rank has a token, all skip the
               forward pass
    launch     forward pass, with zero tokens on idle ranks (runner.py); one token per request (sampler.py)
    finish     the host learns the tokens, and the scheduler retires the requests that they end

With config.overlap_schedule (the default on GPUs; not --overlap) a step is finished after the next one has been
launched, so that the GPU never waits for the host: the next step takes its tokens from the device, where sampling left
them, and the host learns them one step late. A request that turns out to have stopped has then computed a token too
many, which is dropped. A step is finished before the next is scheduled where that depends on its tokens: before a
preemption, where log-probabilities of prompts are wanted, and with drafts, whose number decides the next positions.

Sleeping. Ranks without work do not poll. The process that distributes requests numbers them 1, 2, 3, ... and sends
every number to every rank: the request itself to the rank that runs it, a bare wake-up to the others, each rank's
messages in order. A rank first adds what it has received, then calls step(seen_seq) with the highest number. step()
returns all_idle, equal on all ranks, when no rank has work and all have seen the same number; then every rank blocks on
its messages until the number grows, and only then calls step() again.

Why no rank is left behind: if all ranks report n and no work, every request up to n was added to its rank before that
rank reported, and has ended; a later request has a number above n, which every rank, asleep or not, will receive.
While some rank has not received n yet, the reported numbers differ and no rank sleeps. A rank that wakes first waits in
the next header all-gather for the others, which the same number wakes; the all-gather has a deadline and names the rank
that does not come. Messages that bring no work (an abort) have no number and wake no rank into a step.
With one rank, or where all ranks add the same requests in the same order (LLM), seen_seq can stay 0.

Views. Ranks may be lost, and others take their places (docs/elastic.md). Then every rank that goes on calls suspend(),
which throws the step under way away, and, once all have, enter_view(): with the new view's ranks, and with the experts
that their slots hold then. Where nothing is lost, leave_at_boundary() makes all ranks stop before the same step.
"""

import contextlib
import logging
import time
from collections.abc import Callable, Sequence

import torch

from eprt.config import EngineConfig
from eprt.engine import sampler
from eprt.engine.acceptance import Acceptance
from eprt.engine.batch_rows import BatchRows
from eprt.engine.device_gap import DeviceGap
from eprt.engine.drafter import Drafter
from eprt.engine.expert_watch import watch_experts
from eprt.engine.grammars import Grammars
from eprt.engine.handoff import Handoff
from eprt.engine.intake import Intake
from eprt.engine.launched_step import LaunchedStep
from eprt.engine.masks import MaskMaker
from eprt.engine.membership import Membership
from eprt.engine.memory_plan import make_cache
from eprt.engine.outputs import EngineStats, StepResult, SuspendedState, TokenOutput
from eprt.engine.overlap_policy import OverlapPolicy
from eprt.engine.preparation import Preparation
from eprt.engine.prompt_team import PromptTeam
from eprt.engine.request import RequestLimits
from eprt.engine.runner import Runner
from eprt.engine.sampling_params import SamplingParams
from eprt.engine.schedule import Schedule
from eprt.engine.scheduler import Scheduler
from eprt.engine.step_headers import StepHeaders
from eprt.engine.step_work import StepWork
from eprt.engine.warm_up import log_graphs, prepare_gpu
from eprt.ep.errors import EPError
from eprt.ep.group.agreement import require_same_options
from eprt.ep.group.group import EPGroup
from eprt.ep.group.view import View
from eprt.models.loader import load_model
from eprt.models.model import Model

_log = logging.getLogger(__name__)


class Engine:
    """One rank. Construction and step() are collective; add_request() and abort() concern this rank only.

    Args:
        group: default the group of one.
        model: a loaded model; default: config.model_dir is loaded.
    """

    def __init__(
        self,
        config: EngineConfig,
        group: EPGroup | None = None,
        *,
        model: Model | None = None,
        progress: Callable | None = None,
    ):
        self.config = config
        self.group = group if group is not None else EPGroup.single()
        require_same_options(self.group, config)
        self._owns_model = model is None
        self.model: Model = load_model(config, self.group, progress) if model is None else model
        cache = make_cache(config, self.group, self.model, has_files=self._owns_model)
        self._pool, self._kv_token_bytes = cache.pool, cache.token_bytes
        self.limits = RequestLimits(self.model.config.vocab_size, cache.max_model_len, cache.num_tokens)
        num_drafts = config.num_speculative_tokens
        sizes = cache.max_model_len, self._pool.page_size, self.limits.vocab_size
        self._rows = rows = BatchRows(config.max_running, *sizes, num_drafts, self._pool.num_tail, cache.first_page)
        sizes = config.chunk_size, config.max_running
        self.scheduler = Scheduler(self._pool, rows, *sizes, replays_decodes=not self._on_gpu)
        num_layers = self.model.config.num_hidden_layers
        # Whether a step is launched before the previous one is finished.
        self.overlap_schedule = self._on_gpu if config.overlap_schedule is None else config.overlap_schedule
        self.overlap_schedule &= not num_drafts
        self.team = PromptTeam.for_config(config, self.group, rows, cache.team_pages, self.model.device)
        how = config.chunk_size, self.overlap_schedule, None if self.team is None else self.team.barrier.wait
        self.runner = Runner(self.model, cache.layers[:num_layers], rows, *how)
        self._schedule: Schedule | None = None  # of the step that is not launched yet
        self._launched: list[LaunchedStep] = []  # that are not finished yet, at most two
        self._outputs: list[TokenOutput] = []  # of finished steps, not returned yet
        self.grammars = Grammars.from_checkpoint(config.model_dir, self.model.config)
        self._preparation = Preparation(self.grammars, self.scheduler)
        self.handoff = Handoff(self.scheduler, cache.pages, self.grammars.compile)
        self.intake = Intake(self.group, self.model.config, config, self.limits, self._preparation, self.handoff)
        self._masks = MaskMaker(rows, self.runner.draft_token_MK, self.grammars)
        self.gap = DeviceGap(self.model.device)
        experts = watch_experts(config, self.group, self.model)
        self.recorder, self._router, self.migrator = experts.recorder, experts.router, experts.migrator
        self._acceptance: Acceptance | None = None
        self.drafter: Drafter | None = None
        if num_drafts:
            token_MK, mtp_cache = self.runner.draft_token_MK, cache.layers[num_layers]
            if config.speculative_acceptance == "rejection":
                self._acceptance = Acceptance(rows, token_MK)
            self.drafter = Drafter(self.model, mtp_cache, rows, token_MK, self.recorder, self._acceptance)
        self.overlap = OverlapPolicy.for_model(config, self.model)
        if self.group.rank == 0:
            self.overlap.log()
        self._headers = StepHeaders(self.group, self.overlap, self.migrator, self.team)
        self.step_waits = self._headers.waits
        parts = self._headers, self._router, self.migrator, self.team
        self.membership = Membership(self.group, self.model, *parts, config.replica_routing == "local")
        self._leaves_for = 0  # number of the view for which this rank shall stop, 0 for none
        self.work = StepWork()
        self.ended_by = ""  # why step() can no longer be called, "" while it can
        self._can_resume = True  # whether suspend() and enter_view() make step() possible again
        self._is_suspended = self._left_whole = False  # the latter: all ranks have stopped, with nothing under way
        self._prepare_gpu()

    @property
    def _on_gpu(self) -> bool:
        return self.model.device.type == "cuda"

    def _prepare_gpu(self) -> None:
        """Compiles kernels and records graphs, on all ranks before any of them serves."""
        if self._on_gpu:
            replays = self._router is None  # it splits on the host: no graphs
            recorded = prepare_gpu(
                self.runner, self.drafter, self.config, self.limits.max_model_len, self.overlap, replays
            )
            if self.group.rank == 0:
                log_graphs(*recorded)
            self.model.reset_counters()
            self.group.barrier()

    # -- requests of this rank --

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        sample_idx: int = 0,
        generated: Sequence[int] = (),
        hands_over: bool = False,
    ) -> None:
        """Queues one sequence. For params.n the caller adds n requests, with sample_idx 0..n-1 and one seed.

        Where params.seed is None, one is drawn here, so the caller must draw the seed that n requests are to share.
        generated: the tokens that another rank has generated with the same params, seed and sample_idx: the request
        goes on behind them as it would have there. No output repeats them, nor the prompt's log-probabilities.
        hands_over: it goes on in another instance after one token, and its pages are held for that (handoff.py).
        Raises ValueError for a request that can never run or whose id is in use, QueueFullError past max_queue.
        """
        self.intake.add_request(request_id, prompt_token_ids, params, sample_idx, generated, hands_over)

    def abort(self, request_id: str) -> bool:
        """Drops a request and frees its pages at once; no output follows. False if it has already ended."""
        dropped = self._preparation.drop_request(request_id) or self.scheduler.abort(request_id)
        return dropped or self.handoff.drop_request(request_id)

    @property
    def has_work(self) -> bool:
        """Whether this rank has a request, running or waiting, or a step to finish."""
        return self.scheduler.has_requests or bool(self._launched or self._preparation)

    # -- all ranks together --

    def step(self, seen_seq: int = 0) -> StepResult:
        """One step; the module docstring explains seen_seq, and what the caller must do when all are idle.

        Raises EPTimeoutError or RankLostError when a rank does not take part. After any error, also an interrupt from
        the keyboard, the engine does not go on: its prefix cache knows pages that may never have been filled.
        """
        self.check_alive()
        try:
            return self._step(seen_seq)
        except BaseException as error:
            what = f"{type(error).__name__} ({error})" if str(error) else type(error).__name__
            self.ended_by = f"a step of this engine was broken off by {what}"
            self._can_resume = isinstance(error, EPError)
            if self.migrator is not None and isinstance(error, EPError):
                self.migrator.abort(str(error))
            raise

    def check_alive(self) -> None:
        """RuntimeError saying why there can be no step now."""
        if self._is_suspended:
            raise RuntimeError("this engine is suspended: call enter_view() first")
        if self.ended_by:
            raise RuntimeError(f"{self.ended_by}: make a new one")

    def _step(self, seen_seq: int) -> StepResult:
        start = time.perf_counter()
        self._outputs += self._preparation.move_ready()
        self.runner.keep_known([request.row for request in self.scheduler.start_arrived()])
        if self.scheduler.must_preempt():
            self._finish()
        self._schedule = schedule = self.scheduler.schedule()
        offer = None if self.team is None else self.team.offer(schedule)
        low_latency = not schedule.chunks and schedule.num_tokens <= self.config.low_latency_max_tokens
        agreed = self._headers.agree(schedule.num_tokens, offer, low_latency, self.has_work, seen_seq, self._leaves_for)
        if agreed.leaves:
            self._finish()
            self._left_whole = True
            return StepResult(self._take_outputs(), all_idle=False, leaves=True)
        if self.team is not None:
            self._schedule = schedule = self.team.share(schedule, agreed.pieces, agreed.offers_N)
        if agreed.computes:
            self._launched.append(self._launch(schedule, agreed.mode, agreed.overlap))
        self._schedule = None
        now = not self.overlap_schedule or any(c.request.prompt_logprobs is not None for c in schedule.chunks)
        self._finish(num_left=0 if now or not agreed.computes else 1)
        if agreed.computes:
            self.work.count_step(time.perf_counter() - start)
            if self.migrator is not None:
                self.migrator.stepped(self.work.last_step_s)
        else:
            self.gap.ignore_pause()
        return StepResult(self._take_outputs(), agreed.all_idle, schedule.num_tokens, agreed.mode)

    @torch.inference_mode()
    def _launch(self, schedule: Schedule, mode: str, overlap: str) -> LaunchedStep:
        """The forward pass, and on ranks with tokens the sampling; waits for neither."""
        self.recorder.begin(schedule.num_tokens, schedule.num_decode_tokens)
        packed = self.runner.pack(schedule, mode, overlap, self.config.overlap_sms)
        sample, num_accepted, prompt_logprobs = None, None, []
        self._masks.begin(schedule, self._launched[-1] if self._launched else None)
        self.gap.begin_step()
        logits_XV, *hidden_TH = self.runner.forward(packed.batch, wants_hidden=self.drafter is not None)
        if schedule.num_tokens:
            prompt_logprobs = self.runner.prompt_logprobs(schedule, logits_XV)
            sample = sampler.launch(
                logits_XV[: len(schedule.row_X)],
                schedule.row_X,
                self._rows,
                last_token_M=self.runner.last_token_M,
                drafts=schedule.drafts,
                acceptance=self._acceptance,
                masks=self._masks.finish(),
            )
            self.runner.keep_sampled(packed, sample.token_X)
        self.recorder.end()
        if self.drafter is not None:
            token_X = None if sample is None else sample.token_X
            num_accepted = self.drafter.launch(schedule, packed, hidden_TH[0], token_X)
        self.gap.end_step()
        self.handoff.note_launched(schedule)
        self.scheduler.advance(schedule)
        return LaunchedStep(schedule, sample, prompt_logprobs, num_accepted)

    @torch.inference_mode()
    def _finish(self, num_left: int = 0) -> None:
        """Waits for launched steps until num_left are left, and records their tokens. Drafts may still be computed."""
        while len(self._launched) > num_left:
            step = self._launched[0]
            sampled = step.fetch()
            self.membership.check()  # before anything of the step counts: what its kernels have reported by now
            del self._launched[0]
            self.gap.collect()
            accepted_S = step.count_accepted()
            self._outputs += self.scheduler.commit(step.schedule, sampled, step.prompt_logprobs, accepted_S)
            if self.drafter is not None:
                self.drafter.count_drafts(step.schedule, accepted_S)

    def _take_outputs(self) -> list[TokenOutput]:
        outputs, self._outputs = self._outputs, []
        return outputs

    # -- from view to view --

    def leave_at_boundary(self, view_number: int) -> None:
        """All ranks shall stop before the same step, with nothing thrown away: that whose result says `leaves`, once
        all have been told. view_number: above 0, of the view that comes."""
        self._leaves_for = view_number

    def suspend(self) -> SuspendedState:
        """Throws away what is under way, without another rank: after step() has failed or said `leaves`, or between two
        steps. Again and again, if need be. RuntimeError after a failure that is not one of communication."""
        if not self._can_resume:
            raise RuntimeError(f"{self.ended_by}: make a new one")
        self.membership.halt(nothing_under_way=self._left_whole)
        with contextlib.suppress(EPError):
            self._finish()
        if self._schedule is not None:
            self.scheduler.drop_step(self._schedule)
        for step in reversed(self._launched):
            self.scheduler.drop_step(step.schedule, advanced=True)
        self._schedule = None
        self._launched.clear()
        self._masks.start_again()
        self.runner.restore_sampled()
        self.step_waits.forget_exchange()
        self.gap.ignore_pause()
        self._leaves_for = 0
        self.ended_by, self._is_suspended, self._left_whole = "", True, False
        return self.membership.state(self._take_outputs())

    def enter_view(
        self,
        view: View,
        rows: Sequence[Sequence[int]],
        epoch: int,
        placement_epoch: int = 0,
        lacks_experts: bool = False,
    ) -> None:
        """Goes on with the ranks of the view. On all of them, each after all have called suspend().

        rows: per MoE layer, the logical expert in each slot of all ranks, -1 for none, as for ranks that take no part.
            Experts that this rank does not hold are read from the checkpoint.
        epoch, placement_epoch: above all ranks' in SuspendedState.
        lacks_experts: some experts have no slot. Tokens are computed without them, and their outputs say so; what they
            leave in the KV cache is for their own request alone.
        ValueError, before anything changes, where these do not fit; RankLostError where a rank is lost by now.
        """
        self.membership.enter(view, rows, epoch, placement_epoch, lacks_experts)
        self.scheduler.lacks_experts = lacks_experts
        self._is_suspended = False

    # -- inspection --

    def stats(self) -> EngineStats:
        scheduler = self.scheduler
        return EngineStats(
            rank=self.group.rank,
            num_steps=self.work.num_steps,
            num_prompt_tokens=scheduler.num_prompt_tokens,
            num_generated_tokens=scheduler.num_generated_tokens,
            num_preemptions=scheduler.num_preemptions,
            num_cached_tokens=scheduler.num_cached_tokens,
            num_drafts=scheduler.num_drafts,
            num_drafted_tokens=scheduler.num_drafted_tokens,
            num_accepted_tokens=scheduler.num_accepted_tokens,
            num_running_now=len(scheduler.running),
            num_waiting_now=len(scheduler.waiting) + len(self._preparation),
            kv_pages_total=self._pool.num_pages,
            kv_pages_used_now=self._pool.num_owned,
            last_step_s=self.work.last_step_s,
            kv_page_tokens=self._pool.page_size,
            kv_token_bytes=self._kv_token_bytes,
            kv_longest_context=self.limits.max_model_len,
            num_held_now=self.handoff.num_held,
            num_arriving_now=self.handoff.num_arriving,
            num_pulled_pages=self.handoff.num_pulled_pages,
            num_gaps=self.gap.num_gaps,
            gap_s=self.gap.total_s,
            **self._headers.step_counts(),
            expert_tokens=self.recorder.tokens_PLE.tobytes(),
            slot_tokens=[sum(row) for row in self.model.expert_load()],
            migration=None if self.migrator is None else self.migrator.status(),
        )

    def check_integrity(self) -> None:
        """Raises RuntimeError naming the page, row or request that is not accounted for exactly."""
        self.scheduler.check_integrity(self.handoff.arriving_requests())

    def close(self) -> None:
        """Frees what the engine made, the model included if it loaded it. Collective. The group stays its owner's."""
        self.ended_by, self._can_resume = self.ended_by or "this engine is closed", False
        for part in (self._masks, self._preparation, self.membership):
            part.close()
        if self._owns_model:
            self.model.close()
        for part in (self.migrator, self._headers, self.team, self.handoff, self._router):
            if part is not None:
                part.close()
