"""Metrics of requests and tokens, counted by the frontend as they pass; /metrics in Prometheus' text format.

Knows nothing of ranks but their numbers: what is read from them at scrape time is collected by metrics.py and other
rooms' metrics.py.
"""

import time
from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from eprt.serve.ranks.vllm_metrics import VllmCounts
from eprt.serve.tiers.metrics import TierCounts
from eprt.serve.tiers.tier import Tier

_TTFT_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_ITL_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2.5, 10)
_E2E_S = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320)


class RequestMetrics:
    """The frontend's own counts, and the registry that /metrics is generated from."""

    def __init__(self, tiers: Sequence[Tier] = ()):
        self.registry = CollectorRegistry()
        reg = self.registry

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"eprt_{name}_seconds", text, buckets=buckets, registry=reg)

        self.ttft = histogram("time_to_first_token", "From a sequence's admission to its first token", _TTFT_S)
        self.itl = histogram("inter_token_latency", "Between two tokens of a sequence", _ITL_S)
        self.e2e = histogram("e2e_request_latency", "From a request's arrival to the end of its answer", _E2E_S)
        self.vllm = VllmCounts()
        self.tiers = TierCounts(tiers, reg)
        self.requests = Counter("eprt_requests", "By endpoint and outcome", ["endpoint", "outcome"], registry=reg)
        self.faults = Counter("eprt_faults", "Broken invariants found by idle ranks: a leaked page", registry=reg)
        self._recent_e2e_s = 1.0

    def observe_token(self, rank: int, waited_s: float, is_first: bool) -> None:
        (self.ttft if is_first else self.itl).observe(waited_s)
        self.vllm.observe_token(rank, waited_s, is_first)

    def observe_request(self, endpoint: str, outcome: str, started_s: float) -> None:
        """A request has ended. outcome: an error's code, or the finish reason of the request's first sequence."""
        self.requests.labels(endpoint, outcome).inc()
        if outcome in ("stop", "length", "tool_calls"):
            waited_s = time.monotonic() - started_s
            self.e2e.observe(waited_s)
            self._recent_e2e_s += 0.1 * (waited_s - self._recent_e2e_s)

    def seconds_until_room(self) -> int:
        """For Retry-After: about as long as requests take at present, in 1..60."""
        return max(1, min(60, round(self._recent_e2e_s)))

    def text(self) -> bytes:
        return generate_latest(self.registry)
