"""What leaves the engine: TokenOutputs and a StepResult from every step, EngineStats when asked, LLM's RequestOutputs.

TokenOutput is a msgspec.Struct: made once per token on the hot path, and sent as it is to the process that serves HTTP.
"""

from dataclasses import dataclass, field

import msgspec

from eprt.ep.migration.job import MigrationStatus


class TokenOutput(msgspec.Struct, frozen=True, gc=False):
    """One sampled token of one request, or its end.

    token_id: -1 where the output carries no token (finish_reason "abort", or max_tokens=0).
    logprob: natural log of the chosen token's probability, before bias, penalties and temperature. top_logprobs: the
    params.logprobs most likely (token id, logprob) pairs, best first.
    finish_reason: None while the request runs, then "stop" (EOS or a stop token id, which is included here), "length"
    (max_tokens or max_model_len) or "abort".
    On the first output only: prompt_logprobs, one (logprob of this token, top pairs) per prompt token after the first;
    num_cached_tokens, prompt tokens served from the prefix cache.
    error: why the engine gave the request up (finish_reason "abort").
    """

    request_id: str
    token_id: int
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()
    finish_reason: str | None = None
    prompt_logprobs: tuple[tuple[float, tuple[tuple[int, float], ...]], ...] | None = None
    num_cached_tokens: int = 0
    error: str | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    """One step of one rank. outputs: this rank's, in no particular order between requests.

    all_idle: equal on all ranks; when true every rank must sleep until it hears of a new request (see engine.py).
    num_tokens: tokens this rank computed. mode: "low_latency" or "normal", equal on all ranks.
    """

    outputs: list[TokenOutput]
    all_idle: bool
    num_tokens: int = 0
    mode: str = "low_latency"


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counters of one rank since it started, except where "now" is said.

    num_prompt_tokens: prompt tokens of admitted requests; num_cached_tokens: those of them found in the prefix cache.
    num_gaps, gap_s: pauses of the GPU between two steps, and their sum (device_gap.py); 0 on CPUs.
    num_two_batch_steps, num_single_batch_steps: of num_steps, those with that overlap (overlap_policy.py).
    num_drafted_tokens, num_accepted_tokens: drafts of the MTP layer that were computed, and those that held.
    expert_tokens: int64 [2, L, E] as bytes, choices of each logical expert by this rank's tokens, prefill and decode
    (eprt/ep/placement/load.py); empty without MoE layers. slot_tokens: rows this rank's experts got, per MoE layer.
    migration: the latest of this rank, None where experts cannot move.
    """

    rank: int
    num_steps: int
    num_prompt_tokens: int
    num_generated_tokens: int
    num_preemptions: int
    num_cached_tokens: int
    num_running_now: int
    num_waiting_now: int
    kv_pages_total: int
    kv_pages_used_now: int
    last_step_s: float
    num_gaps: int = 0
    gap_s: float = 0.0
    num_two_batch_steps: int = 0
    num_single_batch_steps: int = 0
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0
    expert_tokens: bytes = b""
    slot_tokens: list[int] = field(default_factory=list)
    migration: MigrationStatus | None = None


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One completion of a prompt. index: 0..n-1. token_ids include an ending EOS or stop token; text never does.

    text is None when the checkpoint has no tokenizer. logprobs, top_logprobs: one per token, None unless asked for.
    error: why the engine gave it up (finish_reason "abort").
    """

    index: int
    token_ids: list[int]
    text: str | None
    finish_reason: str
    logprobs: list[float] | None = None
    top_logprobs: list[tuple[tuple[int, float], ...]] | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """All completions of one prompt. prompt is the text, where the prompt was given as text."""

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: tuple[tuple[float, tuple[tuple[int, float], ...]], ...] | None = None
    num_cached_tokens: int = 0
