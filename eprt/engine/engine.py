"""Engine: one rank's requests, and the step that all ranks take together.

Attention is data parallel: a request and its KV pages live on one rank from arrival to end. Experts are shared: every
forward pass exchanges tokens between all ranks, so all ranks must take every step, also those without a request.

A step

    schedule   this rank chooses its tokens (scheduler.py); no other rank is asked
    agree      the ranks all-gather a header of integers each (IntAllGather):
                   number of tokens | all decodes and few enough for low latency | has work | seen_seq |
                   time of arrival and since the last exchange, which tell which rank is late (step_waits.py) |
                   offered, progress and room of a migration of experts (ep/migration/migrator.py)
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
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from eprt.config import EngineConfig
from eprt.engine import sampler, step_waits
from eprt.engine.acceptance import Acceptance
from eprt.engine.batch_rows import BatchRows
from eprt.engine.device_gap import DeviceGap
from eprt.engine.drafter import Drafter
from eprt.engine.kv_cache import KVCache
from eprt.engine.outputs import EngineStats, Logprob, StepResult, TokenOutput
from eprt.engine.overlap_policy import OverlapPolicy
from eprt.engine.request import QueueFullError, Request, RequestLimits
from eprt.engine.runner import Runner
from eprt.engine.sampling_params import SamplingParams
from eprt.engine.schedule import SampledTokens, Schedule
from eprt.engine.scheduler import Scheduler
from eprt.engine.step_waits import StepWaits
from eprt.engine.warm_up import log_graphs, record_decodes, warm_up
from eprt.ep.errors import EPError
from eprt.ep.group.agreement import require_same_options
from eprt.ep.group.group import EPGroup
from eprt.ep.group.int_all_gather import IntAllGather
from eprt.ep.migration.migrator import MigrationHeader, Migrator
from eprt.ep.migration.transports import make_transport
from eprt.ep.placement.batch_router import METHODS as ROUTING_METHODS
from eprt.ep.placement.batch_router import BatchRouter
from eprt.ep.placement.load import DeviceLoadRecorder, LoadRecorder
from eprt.gpu.readback import HostSnapshot
from eprt.models.loader import load_model
from eprt.models.model import Model

_log = logging.getLogger(__name__)

# Tokens, low latency, has work, seen_seq, times; offered, progress, room.
_NUM_HEADER_VALUES = 7 + step_waits.NUM_VALUES


@dataclass(frozen=True)
class _LaunchedStep:
    """A step between its launch and the moment when the host looks at its tokens."""

    schedule: Schedule
    sample: sampler.Sample | None  # None where this rank has no token to choose
    prompt_logprobs: list[list[Logprob]]
    num_accepted: HostSnapshot | None  # how many of the step's drafts are accepted, int64 [S]; None without drafts


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
        cache = KVCache.for_model(config, self.model)
        self._pool, kv_cache_LPSD = cache.pool, cache.pages_LPSD
        self.limits = RequestLimits(self.model.config.vocab_size, cache.max_model_len, cache.num_tokens)
        num_drafts = config.num_speculative_tokens
        self._rows = rows = BatchRows(
            config.max_running, cache.max_model_len, config.page_size, self.limits.vocab_size, num_drafts
        )
        self.scheduler = Scheduler(self._pool, rows, config.chunk_size, config.max_running)
        num_layers = self.model.config.num_hidden_layers
        # Whether a step is launched before the previous one is finished; all ranks may switch it off while idle.
        self.overlap_schedule = self._on_gpu if config.overlap_schedule is None else config.overlap_schedule
        self.overlap_schedule &= not num_drafts
        self.runner = Runner(self.model, kv_cache_LPSD[:num_layers], rows, config.chunk_size, self.overlap_schedule)
        self._launched: _LaunchedStep | None = None
        self.gap = DeviceGap(kv_cache_LPSD.device)
        self.overlap = OverlapPolicy.for_model(config, self.model)
        if self.group.rank == 0:
            self.overlap.log()
        self._router: BatchRouter | None = None
        self.recorder, self.migrator = self._watch_experts()
        self._acceptance: Acceptance | None = None
        self.drafter: Drafter | None = None
        if num_drafts:
            token_MK, kv_pages = self.runner.draft_token_MK, kv_cache_LPSD[num_layers]
            if config.speculative_acceptance == "rejection":
                self._acceptance = Acceptance(rows, token_MK)
            self.drafter = Drafter(self.model, kv_pages, rows, token_MK, self.recorder, self._acceptance)
        self._headers = IntAllGather(self.group, num_values=_NUM_HEADER_VALUES)
        self.step_waits = StepWaits(self.group.node_of_rank, self.group.rank)
        self._seeds = np.random.default_rng([config.seed, self.group.rank])
        self.overlap_steps = {"none": 0, "tbo": 0, "sbo": 0}
        self._num_steps, self._last_step_s = 0, 0.0
        self.ended_by = ""  # why step() can no longer be called, "" while it can
        self._prepare_gpu()

    def _watch_experts(self) -> tuple[LoadRecorder, Migrator | None]:
        """What counts the load of the experts, and what moves them where there is memory for it."""
        moe_layers = self.model.moe_layers()
        if not moe_layers:
            return LoadRecorder(0, 0, 0), None
        moe, config = moe_layers[0].config, self.config
        shape = (len(moe_layers), moe.num_experts, moe.top_k)
        recorder = LoadRecorder(*shape)
        if self._on_gpu:
            most_tokens, drafts = max(config.chunk_size, config.max_num_seqs), int(config.num_speculative_tokens > 0)
            recorder = DeviceLoadRecorder(*shape, most_tokens, self.model.device, drafts)
        if config.replica_routing in ROUTING_METHODS:
            self._router = BatchRouter(self.group, moe.num_experts, ROUTING_METHODS[config.replica_routing])
        for row, layer in enumerate(moe_layers):
            layer.record_load(recorder, row)
            if self._router is not None:
                layer.route_by(self._router, row)
        if not config.spare_experts:
            return recorder, None
        transport = make_transport(self.group, list({id(layer.pool): layer.pool for layer in moe_layers}.values()))
        routing = config.replica_routing, self._router
        return recorder, Migrator(self.group, moe_layers, transport, config.spare_experts, *routing)

    @property
    def _on_gpu(self) -> bool:
        return self.model.device.type == "cuda"

    def _prepare_gpu(self) -> None:
        """Compiles kernels and records graphs, on all ranks before any of them serves."""
        if not self._on_gpu:
            return
        config = self.config
        longest = min(config.chunk_size, self.limits.max_model_len)
        warm_up(self.runner, self.drafter, longest, lambda num_tokens: self.overlap.for_step([num_tokens], "normal"))
        most_decodes = config.max_running * (1 + config.num_speculative_tokens)  # at most a chunk
        most_rows = min(config.low_latency_max_tokens, most_decodes)
        num_pages = -(-self.limits.max_model_len // config.page_size)
        wanted = config.graph_sizes if self._router is None else ()  # the router splits on the host: no graphs
        sizes = record_decodes(self.runner, self.drafter, wanted, most_rows, num_pages, self.overlap.decode)
        if self.group.rank == 0:
            log_graphs(sizes, most_decodes, most_rows)
        self.model.reset_counters()
        self.group.barrier()

    # -- requests of this rank --

    def add_request(
        self, request_id: str, prompt_token_ids: Sequence[int], params: SamplingParams, sample_idx: int = 0
    ) -> None:
        """Queues one sequence. For params.n the caller adds n requests, with sample_idx 0..n-1 and one seed.

        Where params.seed is None, one is drawn here, so the caller must draw the seed that n requests are to share.
        Raises ValueError for a request that can never run or whose id is in use, QueueFullError past max_queue.
        """
        self.limits.check(prompt_token_ids, params)
        if len(self.scheduler.waiting) >= self.config.max_queue:
            raise QueueFullError(
                f"[rank {self.group.rank}/{self.group.size}] {len(self.scheduler.waiting)} requests are waiting, "
                f"max_queue is {self.config.max_queue}; try again later"
            )
        seed = int(self._seeds.integers(1 << 63)) if params.seed is None else params.seed
        self.scheduler.add_request(
            Request.new(
                request_id,
                prompt_token_ids,
                params,
                sample_idx=sample_idx,
                seed=seed,
                max_model_len=self.limits.max_model_len,
                eos_token_ids=self.model.config.eos_token_ids,
            )
        )

    def abort(self, request_id: str) -> bool:
        """Drops a request and frees its pages at once; no output follows. False if it has already ended."""
        return self.scheduler.abort(request_id)

    @property
    def has_work(self) -> bool:
        """Whether this rank has a request, running or waiting, or a step to finish."""
        return self.scheduler.has_requests or self._launched is not None

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
            if self.migrator is not None and isinstance(error, EPError):
                self.migrator.abort(str(error))
            raise

    def check_alive(self) -> None:
        """RuntimeError saying why there can be no more steps."""
        if self.ended_by:
            raise RuntimeError(f"{self.ended_by}: make a new one")

    def _step(self, seen_seq: int) -> StepResult:
        start = time.perf_counter()
        outputs = self._finish() if self.scheduler.must_preempt() else []
        schedule = self.scheduler.schedule()
        anyone_computes, mode, overlap, all_idle = self._agree(schedule, seen_seq)
        launched = self._launch(schedule, mode, overlap) if anyone_computes else None
        outputs += self._finish()
        self._launched = launched
        if not self.overlap_schedule or any(chunk.request.prompt_logprobs is not None for chunk in schedule.chunks):
            outputs += self._finish()
        if anyone_computes:
            self._num_steps += 1
            self._last_step_s = time.perf_counter() - start
            if self.migrator is not None:
                self.migrator.stepped(self._last_step_s)
        else:
            self.gap.ignore_pause()
        return StepResult(outputs, all_idle, schedule.num_tokens, mode)

    def _agree(self, schedule: Schedule, seen_seq: int) -> tuple[bool, str, str, bool]:
        """Whether any rank computes, the mode and the overlap of the step, whether all are idle: equal on all ranks."""
        wants_low_latency = not schedule.chunks and schedule.num_tokens <= self.config.low_latency_max_tokens
        migrator = self.migrator
        migration = MigrationHeader() if migrator is None else migrator.header()
        has_work = self.has_work or (migrator is not None and migrator.active)
        header = (
            schedule.num_tokens,
            wants_low_latency,
            has_work,
            seen_seq,
            *self.step_waits.begin_exchange(),
            *migration,
        )
        # Plain integers: for a few ranks they are faster than numpy.
        rows = self._headers.all_gather(header).tolist()
        num_tokens_N, low_latency_N, has_work_N, seen_seq_N, arrived_ns_N, took_ns_N, *migration_3N = zip(*rows)
        if migrator is not None:
            migrator.advance([MigrationHeader(*of_rank) for of_rank in zip(*migration_3N)])
        all_idle = not any(has_work_N) and min(seen_seq_N) == max(seen_seq_N)
        self.step_waits.end_exchange(arrived_ns_N, took_ns_N, all_idle)
        mode = "low_latency" if all(low_latency_N) else "normal"
        overlap = self.overlap.for_step(num_tokens_N, mode)
        self.overlap_steps[overlap] += any(num_tokens_N)
        return any(num_tokens_N), mode, overlap, all_idle

    @torch.inference_mode()
    def _launch(self, schedule: Schedule, mode: str, overlap: str) -> _LaunchedStep:
        """The forward pass, and on ranks with tokens the sampling; waits for neither."""
        self.recorder.begin(schedule.num_tokens, schedule.num_decode_tokens)
        packed = self.runner.pack(schedule, mode, overlap, self.config.overlap_sms)
        sample, num_accepted, prompt_logprobs = None, None, []
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
            )
            self.runner.keep_sampled(packed, sample.token_X)
        self.recorder.end()
        if self.drafter is not None:
            token_X = None if sample is None else sample.token_X
            num_accepted = self.drafter.launch(schedule, packed, hidden_TH[0], token_X)
        self.gap.end_step()
        self.scheduler.advance(schedule)
        return _LaunchedStep(schedule, sample, prompt_logprobs, num_accepted)

    @torch.inference_mode()
    def _finish(self) -> list[TokenOutput]:
        """Waits for the launched step, if any, and records its tokens. Its new drafts may still be computed."""
        step, self._launched = self._launched, None
        if step is None:
            return []
        sampled = SampledTokens(np.zeros(0, dtype=np.int64)) if step.sample is None else step.sample.fetch()
        self.model.exchange.check()  # before anything of the step counts: what its kernels have reported by now
        self.gap.collect()
        accepted_S = None if step.num_accepted is None else step.num_accepted.values()[0]
        outputs = self.scheduler.commit(step.schedule, sampled, step.prompt_logprobs, accepted_S)
        if self.drafter is not None:
            self.drafter.count_drafts(step.schedule, accepted_S)
        return outputs

    # -- inspection --

    def stats(self) -> EngineStats:
        scheduler = self.scheduler
        return EngineStats(
            rank=self.group.rank,
            num_steps=self._num_steps,
            num_prompt_tokens=scheduler.num_prompt_tokens,
            num_generated_tokens=scheduler.num_generated_tokens,
            num_preemptions=scheduler.num_preemptions,
            num_cached_tokens=scheduler.num_cached_tokens,
            num_drafted_tokens=scheduler.num_drafted_tokens,
            num_accepted_tokens=scheduler.num_accepted_tokens,
            num_running_now=len(scheduler.running),
            num_waiting_now=len(scheduler.waiting),
            kv_pages_total=self._pool.num_pages,
            kv_pages_used_now=self._pool.num_owned,
            last_step_s=self._last_step_s,
            num_gaps=self.gap.num_gaps,
            gap_s=self.gap.total_s,
            num_two_batch_steps=self.overlap_steps["tbo"],
            num_single_batch_steps=self.overlap_steps["sbo"],
            expert_tokens=self.recorder.tokens_PLE.tobytes(),
            slot_tokens=[sum(row) for row in self.model.expert_load()],
            migration=None if self.migrator is None else self.migrator.status(),
        )

    def check_integrity(self) -> None:
        """Raises RuntimeError naming the page, row or request that is not accounted for exactly."""
        self.scheduler.check_integrity()

    def close(self) -> None:
        """Frees what the engine made, the model included if it loaded it. Collective. The group stays its owner's."""
        self.ended_by = self.ended_by or "this engine is closed"
        if self._owns_model:
            self.model.close()
        if self.migrator is not None:
            self.migrator.close()
        self._headers.close()
        if self._router is not None:
            self._router.close()
