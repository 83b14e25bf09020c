"""What /metrics shows, in Prometheus' text format. Histograms are fed as tokens arrive; the rest is read when scraped.

Label sets are bounded: ranks, model layers, the few outcomes of a request, and experts only up to _MAX_EXPERT_SERIES
series (a large model's per-expert load is at /v1/eprt/load; here it shows as load per rank and as skew).
"""

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from eprt.serve.ranks.expert_load import expert_load

if TYPE_CHECKING:
    from eprt.serve.ranks.pool import RankPool

_MAX_EXPERT_SERIES = 4096

_TTFT_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_ITL_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1, 2.5, 10)
_E2E_S = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320)


class Metrics:
    """The frontend's own counts. `outcome` is an error code, or the finish reason of a request's first sequence."""

    def __init__(self):
        self.registry = CollectorRegistry()
        reg = self.registry

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"eprt_{name}_seconds", text, buckets=buckets, registry=reg)

        self.ttft = histogram("time_to_first_token", "From a sequence's admission to its first token", _TTFT_S)
        self.itl = histogram("inter_token_latency", "Between two tokens of a sequence", _ITL_S)
        self.e2e = histogram("e2e_request_latency", "From a request's arrival to the end of its answer", _E2E_S)
        self.requests = Counter("eprt_requests", "By endpoint and outcome", ["endpoint", "outcome"], registry=reg)
        self.faults = Counter("eprt_faults", "Broken invariants found by idle ranks: a leaked page", registry=reg)
        self._recent_e2e_s = 1.0

    def token(self, waited_s: float, is_first: bool) -> None:
        (self.ttft if is_first else self.itl).observe(waited_s)

    def request(self, endpoint: str, outcome: str, started_s: float) -> None:
        """A generation request ended; started_s by time.monotonic()."""
        self.requests.labels(endpoint, outcome).inc()
        if outcome in ("stop", "length", "tool_calls"):
            waited_s = time.monotonic() - started_s
            self.e2e.observe(waited_s)
            self._recent_e2e_s += 0.1 * (waited_s - self._recent_e2e_s)

    def seconds_until_room(self) -> int:
        """For Retry-After: about as long as requests take at present, 1..60."""
        return max(1, min(60, round(self._recent_e2e_s)))

    def watch(self, pool: "RankPool") -> None:
        self.registry.register(_PoolCollector(pool))

    def text(self) -> bytes:
        return generate_latest(self.registry)


class _PoolCollector(Collector):
    """Reads the ranks' latest statistics at scrape time."""

    def __init__(self, pool: "RankPool"):
        self._pool = pool

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterable[Metric]:
        pool = self._pool
        yield GaugeMetricFamily("eprt_up", "1 while new requests are taken", value=pool.state == "serving")
        yield GaugeMetricFamily("eprt_sequences", "Sequences handed to the ranks and not ended", pool.num_sequences)
        yield from self._per_rank()
        yield from self._expert_load()

    def _per_rank(self) -> Iterable[Metric]:
        gauges = (
            ("eprt_requests_running", "Sequences the rank computes", "num_running_now"),
            ("eprt_queue_length", "Sequences that wait on the rank", "num_waiting_now"),
            ("eprt_kv_pages_used", "KV pages owned by sequences", "kv_pages_used_now"),
            ("eprt_kv_pages", "KV pages there are", "kv_pages_total"),
            ("eprt_last_step_seconds", "Duration of the latest step", "last_step_s"),
        )
        counters = (
            ("eprt_steps", "Steps that computed", "num_steps"),
            ("eprt_device_gaps", "Pauses of the GPU between two steps", "num_gaps"),
            ("eprt_device_gap_seconds", "Their sum: the GPU waited for the host", "gap_s"),
            ("eprt_two_batch_steps", "Those of them with two-batch overlap", "num_two_batch_steps"),
            ("eprt_single_batch_steps", "Those of them with single-batch overlap", "num_single_batch_steps"),
            ("eprt_prompt_tokens", "Prompt tokens of admitted sequences", "num_prompt_tokens"),
            ("eprt_generated_tokens", "Generated tokens", "num_generated_tokens"),
            ("eprt_cached_tokens", "Prompt tokens found in the prefix cache", "num_cached_tokens"),
            ("eprt_preemptions", "Sequences sent back to the queue for want of pages", "num_preemptions"),
            ("eprt_drafted_tokens", "Guesses of the MTP layer that a step checked", "num_drafted_tokens"),
            ("eprt_accepted_tokens", "Those of them that held", "num_accepted_tokens"),
        )
        for family, rows in ((GaugeMetricFamily, gauges), (CounterMetricFamily, counters)):
            for name, text, attribute in rows:
                metric = family(name, text, labels=["rank"])
                for stats in self._pool.stats:
                    metric.add_metric([str(stats.rank)], getattr(stats, attribute))
                yield metric

    def _expert_load(self) -> Iterable[Metric]:
        layers = expert_load(self._pool.infos, self._pool.stats)
        per_rank = CounterMetricFamily("eprt_rank_expert_tokens", "Tokens its experts got", labels=["layer", "rank"])
        skew = GaugeMetricFamily("eprt_expert_skew", "Largest rank's share over the mean rank's", labels=["layer"])
        for layer in layers:
            for rank, num_tokens in enumerate(layer.per_rank):
                per_rank.add_metric([str(layer.layer), str(rank)], num_tokens)
            skew.add_metric([str(layer.layer)], layer.skew)
        yield per_rank
        yield skew
        if sum(len(layer.per_expert) for layer in layers) <= _MAX_EXPERT_SERIES:
            per_expert = CounterMetricFamily("eprt_expert_tokens", "Tokens the expert got", labels=["layer", "expert"])
            for layer in layers:
                for expert, num_tokens in enumerate(layer.per_expert):
                    per_expert.add_metric([str(layer.layer), str(expert)], num_tokens)
            yield per_expert
