"""What leaves the engine: TokenOutputs and a StepResult from every step, EngineStats when asked, LLM's RequestOutputs.

TokenOutput is a msgspec.Struct because one is made per token on the hot path, and sent as it is to the process that
serves HTTP. Knows nothing of scheduler or model; imports no torch.
"""

from dataclasses import dataclass, field

import msgspec

from eprt.ep.migration.job import MigrationStatus
from eprt.kv.reader import HeldPages

# Upper bounds by which steps are counted, in tokens of one rank.
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
TopLogprobs = tuple[tuple[int, float], ...]  # (token id, logprob), likeliest first
Logprob = tuple[float, TopLogprobs]  # a token's, and those of the likeliest tokens in its place
PromptLogprob = tuple[float, TopLogprobs, int]  # the same of a token of the prompt, and its rank: 1 for the likeliest


class TokenOutput(msgspec.Struct, frozen=True, gc=False):
    """One sampled token of one request, or its end."""

    request_id: str
    token_id: int  # -1 where the output carries no token (finish_reason "abort", or max_tokens=0)
    logprob: float | None = None  # natural log of the token's probability, before bias, penalties and temperature
    top_logprobs: TopLogprobs = ()  # of the params.logprobs likeliest tokens
    # None while the request runs, then "stop" (token_id is EOS or a stop token), "length" (max_tokens or max_model_len)
    # or "abort".
    finish_reason: str | None = None
    # On the first output only: of each prompt token but the first.
    prompt_logprobs: tuple[PromptLogprob, ...] | None = None
    num_cached_tokens: int = 0  # on the first output only: prompt tokens found in the prefix cache
    queued_s: float = 0.0  # on the first output only: from the request's arrival at the rank to its admission
    error: str | None = None  # why the engine gave up the request (finish_reason "abort")
    lacked_experts: bool = False  # the request was computed, in part, without experts that were lost


@dataclass(frozen=True, slots=True)
class StepResult:
    """One step of one rank."""

    outputs: list[TokenOutput]  # this rank's, in no particular order between requests
    all_idle: bool  # equal on all ranks; where true, every rank must sleep until it hears of a new request (engine.py)
    num_tokens: int = 0  # that this rank computed
    mode: str = "low_latency"  # or "normal"; equal on all ranks
    leaves: bool = False  # equal on all ranks; where true nothing was computed, and Engine.suspend() comes next


class HandoffEvent(msgspec.Struct, frozen=True):
    """What became of a request."""

    request_id: str
    held: HeldPages | None = None  # it is held here; None: its pages have arrived here, or cannot
    num_pulled: int = 0  # pages that were copied; the others were here, or there was no room for a bookmark
    error: str = ""  # why the pages cannot be used: the request is not known here any more


@dataclass(frozen=True)
class SuspendedState:
    """What a rank brings along from one view into the next (Engine.suspend)."""

    expert_of_slot: list[list[int]]  # per MoE layer: the logical expert in each slot of this rank, -1: none
    epoch: int  # the largest that any of its exchanges has used; the next view starts above all ranks'
    placement_epoch: int = 0  # of the placement that this rank serves by; the next view's is above all ranks'
    outputs: list[TokenOutput] = field(default_factory=list)  # of steps that were finished and not returned yet


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counters of one rank since it started, except where a name ends in "now"."""

    rank: int
    num_steps: int
    num_prompt_tokens: int  # of admitted requests
    num_generated_tokens: int
    num_preemptions: int
    num_cached_tokens: int  # prompt tokens that were found in the prefix cache
    num_running_now: int
    num_waiting_now: int
    kv_pages_total: int
    kv_pages_used_now: int
    last_step_s: float
    kv_page_tokens: int = 0  # positions of a KV page
    kv_token_bytes: float = 0.0  # of the KV cache, that each further token of a request takes
    kv_longest_context: int = 0  # tokens of the longest request, by the model and by the cache
    num_gaps: int = 0  # pauses of the GPU between two steps (device_gap.py); 0 on CPUs
    gap_s: float = 0.0  # their sum
    num_two_batch_steps: int = 0  # of num_steps, those with two-batch overlap (overlap_policy.py)
    num_single_batch_steps: int = 0
    num_split_steps: int = 0  # of num_steps, those in which several ranks computed a prompt of this rank's team
    # Steps by this rank's tokens in them, one count per bound of STEP_TOKENS and one beyond the last; their sum.
    step_token_counts: list[int] = field(default_factory=list)
    num_step_tokens: int = 0
    num_drafts: int = 0  # of any number of tokens, by a request in a step
    num_drafted_tokens: int = 0  # that the MTP layer drafted and a step checked
    num_accepted_tokens: int = 0
    # int64 [2, L, E] as bytes: how often this rank's tokens chose each logical expert, in prefill and in decode
    # (eprt/ep/placement/load.py); empty without MoE layers.
    expert_tokens: bytes = b""
    slot_tokens: list[int] = field(default_factory=list)  # per MoE layer: rows that this rank's experts received
    migration: MigrationStatus | None = None  # None where experts cannot move
    num_held_now: int = 0  # requests that go on in another instance, which has not read their pages yet (handoff.py)
    num_arriving_now: int = 0  # requests of other instances whose pages are not all here yet
    num_pulled_pages: int = 0  # that came from other instances


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One completion of a prompt."""

    index: int  # 0..n-1
    token_ids: list[int]  # an ending EOS or stop token included
    text: str | None  # without an ending EOS, stop token or stop string; None where the checkpoint has no tokenizer
    finish_reason: str
    logprobs: list[float] | None = None  # one per token; None unless asked for
    top_logprobs: list[TopLogprobs] | None = None
    error: str | None = None  # why the engine gave up the completion (finish_reason "abort")


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """All completions of one prompt."""

    prompt: str | None  # None where it was given as token ids
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: tuple[Logprob, ...] | None = None
    num_cached_tokens: int = 0
