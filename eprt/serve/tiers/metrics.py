"""Goodput: what each tier's requests got, and how many of them within both of its limits.

Knows nothing of ranks or of HTTP.
"""

from collections.abc import Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from eprt.serve.tiers.tier import Tier

# met: within both limits. aborted: its client left, or the server ended, before it was done.
OUTCOMES = ("met", "late_first_token", "slow_tokens", "late_and_slow", "refused", "failed", "aborted")
_TTFT_S = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_ITL_S = (0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1)


class TierCounts:
    """Of one server. Without tiers nothing is registered."""

    def __init__(self, tiers: Sequence[Tier], registry: CollectorRegistry):
        self._tiers = tuple(tiers)
        if not tiers:
            return
        text = "Requests of the tier; met: within both of its limits"
        self._requests = Counter("eprt_tier_requests", text, ["tier", "outcome"], registry=registry)
        text = "Tokens of the tier's requests; met: of those within both limits"
        self._tokens = Counter("eprt_tier_tokens", text, ["tier", "outcome"], registry=registry)
        limits = Gauge("eprt_tier_limit_seconds", "What the tier allows", ["tier", "of"], registry=registry)
        ttft_s, itl_s = ({getattr(tier, name) for tier in tiers} for name in ("ttft_s", "itl_s"))
        self._ttft = Histogram(
            "eprt_tier_time_to_first_token_seconds",
            "Of a request's slowest sequence",
            ["tier"],
            buckets=sorted({*_TTFT_S, *ttft_s}),
            registry=registry,
        )
        self._itl = Histogram(
            "eprt_tier_time_per_token_seconds",
            "Mean between two tokens, of a request's slowest sequence",
            ["tier"],
            buckets=sorted({*_ITL_S, *itl_s}),
            registry=registry,
        )
        for tier in tiers:
            limits.labels(tier.name, "first_token").set(tier.ttft_s)
            limits.labels(tier.name, "token").set(tier.itl_s)
            self._ttft.labels(tier.name)
            self._itl.labels(tier.name)
            for outcome in OUTCOMES:
                self._requests.labels(tier.name, outcome)
                self._tokens.labels(tier.name, outcome)

    def count_request(self, tier: Tier, outcome: str, num_tokens: int = 0) -> None:
        """outcome: of OUTCOMES."""
        self._requests.labels(tier.name, outcome).inc()
        self._tokens.labels(tier.name, outcome).inc(num_tokens)

    def to_json(self) -> list[dict[str, Any]]:
        """Each tier's limits, and its requests and their tokens by outcome since the start."""
        requests, tokens = ({}, {}) if not self._tiers else map(_by_label, (self._requests, self._tokens))
        return [
            {
                "name": tier.name,
                "ttft_s": tier.ttft_s,
                "itl_s": tier.itl_s,
                "requests": {outcome: requests[tier.name, outcome] for outcome in OUTCOMES},
                "tokens": {outcome: tokens[tier.name, outcome] for outcome in OUTCOMES},
            }
            for tier in self._tiers
        ]

    def observe_times(self, tier: Tier, ttft_s: float, itl_s: float) -> None:
        self._ttft.labels(tier.name).observe(ttft_s)
        self._itl.labels(tier.name).observe(itl_s)


def _by_label(counter: Counter) -> dict[tuple[str, str], int]:
    samples = (sample for family in counter.collect() for sample in family.samples if sample.name.endswith("_total"))
    return {(sample.labels["tier"], sample.labels["outcome"]): int(sample.value) for sample in samples}


class RequestService:
    """What one request of a tier gets: it is counted when its last sequence has ended."""

    def __init__(self, tier: Tier, num_sequences: int, counts: TierCounts):
        self.tier, self._num_open, self._counts = tier, num_sequences, counts
        self._ttft_s = self._itl_s = 0.0  # the longest of a sequence
        self._num_tokens = 0
        self._failure = ""  # an outcome that is no question of time

    def end_sequence(self, reason: str, num_tokens: int, ttft_s: float, last_s: float) -> None:
        """One of its sequences has ended.

        Args:
            reason: as Sequences.end has it.
            ttft_s, last_s: from its start to its first and to its last token.
        """
        if reason in ("abort", "error"):
            self._failure = "failed" if reason == "error" or self._failure == "failed" else "aborted"
        self._num_tokens += num_tokens
        self._ttft_s = max(self._ttft_s, ttft_s)
        self._itl_s = max(self._itl_s, (last_s - ttft_s) / max(1, num_tokens - 1))
        self._num_open -= 1
        if not self._num_open:
            self._count()

    def fail(self) -> None:
        """None of its sequences goes on."""
        if self._num_open > 0:
            self._num_open, self._failure = 0, "failed"
            self._count()

    def _count(self) -> None:
        tier = self.tier
        outcome = self._failure
        if not outcome:
            self._counts.observe_times(tier, self._ttft_s, self._itl_s)
            is_late, is_slow = self._ttft_s > tier.ttft_s, self._itl_s > tier.itl_s
            outcome = ("met", "slow_tokens", "late_first_token", "late_and_slow")[2 * is_late + is_slow]
        self._counts.count_request(tier, outcome, self._num_tokens)
