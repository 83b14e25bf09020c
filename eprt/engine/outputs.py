"""What leaves the engine: one TokenOutput per new token, EngineStats once per window."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class TokenOutput:
    """One sampled token of one request.

    logprob: natural log of the chosen token's probability, before temperature and penalties. top_logprobs: the
    params.logprobs most likely (token id, logprob) pairs. finish_reason: None while the request runs, then "stop"
    (EOS or a stop token id, which is included here), "length" or "abort" (token_id -1: no token).
    prompt_logprobs: on the first output only, one (logprob of this token, top pairs) per prompt token after the first.
    num_cached_tokens: prompt tokens served from the prefix cache. error: text when the engine refused the request.
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
class EngineStats:
    """Counters of one rank since it started, except where "now" is said.

    expert_load: tokens routed to each local expert slot, per MoE layer [L][E].
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
    expert_load: list[list[int]] = field(default_factory=list)
