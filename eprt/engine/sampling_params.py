"""SamplingParams: how one request's tokens are chosen. Frozen, checked once. Knows no model and no vocabulary."""

import math
from dataclasses import dataclass, field
from numbers import Integral, Real


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Names and meanings follow the OpenAI API (top_k, min_p, repetition_penalty, ignore_eos: the usual extensions)."""

    max_tokens: int = 16
    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0  # in (0, 1]
    top_k: int = 0  # 0: all
    min_p: float = 0.0  # in [0, 1]
    n: int = 1  # completions per prompt, each with its own random stream
    seed: int | None = None  # None: the engine draws one
    stop: tuple[str, ...] = ()  # strings, matched where tokens become text
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None  # how many alternatives to report beside the chosen token, in 0..20; None: no report
    prompt_logprobs: bool = False  # report log-probabilities of the prompt's tokens too (echo)
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0  # in 0.001..1000: far beyond that a float32 logit overflows
    logit_bias: dict[int, float] = field(default_factory=dict)  # token id -> bias in -100..100

    def __post_init__(self):
        self._check_types()
        checks = (
            ("max_tokens", self.max_tokens >= 0, "at least 0"),
            ("temperature", math.isfinite(self.temperature) and 0 <= self.temperature <= 2, "in 0..2"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("top_k", self.top_k >= 0, "at least 0 (0 means all)"),
            ("min_p", 0 <= self.min_p <= 1, "in 0..1"),
            ("n", 1 <= self.n <= 128, "in 1..128"),
            ("logprobs", self.logprobs is None or 0 <= self.logprobs <= 20, "in 0..20"),
            ("frequency_penalty", -2 <= self.frequency_penalty <= 2, "in -2..2"),
            ("presence_penalty", -2 <= self.presence_penalty <= 2, "in -2..2"),
            ("repetition_penalty", 1e-3 <= self.repetition_penalty <= 1e3, "in 0.001..1000"),
            ("stop", all(self.stop), "strings of at least one character each"),
            ("logit_bias", all(-100 <= b <= 100 for b in self.logit_bias.values()), "values in -100..100"),
        )
        for name, ok, want in checks:
            if not ok:
                raise ValueError(f"{name}={getattr(self, name)!r}: must be {want}")

    def _check_types(self):
        """A wrong type would show later, on the rank that runs the request, or never: stop="ab" is also two strings."""
        kinds = (
            (Integral, "an integer", ("max_tokens", "top_k", "n")),
            (Integral | None, "an integer or None", ("seed", "logprobs")),
            (Real, "a number", ("temperature", "top_p", "min_p")),
            (Real, "a number", ("frequency_penalty", "presence_penalty", "repetition_penalty")),
            (bool, "True or False", ("ignore_eos", "prompt_logprobs")),
            (tuple | list, "a tuple of strings", ("stop",)),
            (tuple | list, "a tuple of token ids", ("stop_token_ids",)),
            (dict, "a dict of token id to bias", ("logit_bias",)),
        )
        for kind, want, names in kinds:
            for name in names:
                value = getattr(self, name)
                if not isinstance(value, kind) or isinstance(value, bool) != (kind is bool):
                    raise ValueError(f"{name}={value!r}: must be {want}")
        members = (
            (str, "a tuple of strings", "stop", self.stop),
            (Integral, "a tuple of token ids", "stop_token_ids", self.stop_token_ids),
            (Integral, "a dict of token id to bias", "logit_bias", self.logit_bias),
            (Real, "a dict of token id to bias", "logit_bias", self.logit_bias.values()),
        )
        for kind, want, name, values in members:
            if not all(isinstance(value, kind) for value in values):
                raise ValueError(f"{name}={getattr(self, name)!r}: must be {want}")
