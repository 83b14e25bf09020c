"""Metrics of the ranks, read from their latest statistics when /metrics is scraped.

Label sets are bounded: ranks, model layers, and experts only up to _MAX_EXPERT_SERIES series (a large model's load per
expert is at /v1/eprt/load; here it shows as load per rank and as skew). Knows nothing of requests (request_metrics.py).
"""

from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from eprt.serve.ranks.expert_load import expert_load
from eprt.serve.ranks.pool import RankPool

_MAX_EXPERT_SERIES = 4096


class RankCollector(Collector):
    """One series per rank, layer or expert from the pool's state."""

    def __init__(self, pool: RankPool):
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
            ("eprt_kv_pages", "All KV pages", "kv_pages_total"),
            ("eprt_last_step_seconds", "Duration of the latest step", "last_step_s"),
        )
        counters = (
            ("eprt_steps", "Steps that computed", "num_steps"),
            ("eprt_device_gaps", "Pauses of the GPU between two steps", "num_gaps"),
            ("eprt_device_gap_seconds", "Sum of these pauses: the GPU waited for the host", "gap_s"),
            ("eprt_two_batch_steps", "Steps with two-batch overlap", "num_two_batch_steps"),
            ("eprt_single_batch_steps", "Steps with single-batch overlap", "num_single_batch_steps"),
            ("eprt_prompt_tokens", "Prompt tokens of admitted sequences", "num_prompt_tokens"),
            ("eprt_generated_tokens", "Generated tokens", "num_generated_tokens"),
            ("eprt_cached_tokens", "Prompt tokens found in the prefix cache", "num_cached_tokens"),
            ("eprt_preemptions", "Sequences sent back to the queue for lack of pages", "num_preemptions"),
            ("eprt_drafted_tokens", "Tokens that the MTP layer drafted and a step checked", "num_drafted_tokens"),
            ("eprt_accepted_tokens", "Drafted tokens that were accepted", "num_accepted_tokens"),
        )
        for family, rows in ((GaugeMetricFamily, gauges), (CounterMetricFamily, counters)):
            for name, text, attribute in rows:
                metric = family(name, text, labels=["rank"])
                for stats in self._pool.stats:
                    metric.add_metric([str(stats.rank)], getattr(stats, attribute))
                yield metric

    def _expert_load(self) -> Iterable[Metric]:
        layers = expert_load(self._pool.infos, self._pool.stats)
        per_rank = CounterMetricFamily(
            "eprt_rank_expert_tokens", "Tokens that its experts received", labels=["layer", "rank"]
        )
        skew = GaugeMetricFamily("eprt_expert_skew", "Largest rank's share over the mean rank's", labels=["layer"])
        for layer in layers:
            for rank, num_tokens in enumerate(layer.per_rank):
                per_rank.add_metric([str(layer.layer), str(rank)], num_tokens)
            skew.add_metric([str(layer.layer)], layer.skew)
        yield per_rank
        yield skew
        if sum(len(layer.per_expert) for layer in layers) <= _MAX_EXPERT_SERIES:
            per_expert = CounterMetricFamily(
                "eprt_expert_tokens", "Tokens that chose the expert", labels=["layer", "expert"]
            )
            for layer in layers:
                for expert, num_tokens in enumerate(layer.per_expert):
                    per_expert.add_metric([str(layer.layer), str(expert)], num_tokens)
            yield per_expert
