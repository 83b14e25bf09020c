"""Metrics under vLLM's names, so that dashboards, alerts and autoscalers made for vLLM work unchanged.

Names, labels (model_name, engine: a rank) and buckets are those of vLLM 0.33; some that older dashboards ask for are
here too. Counts of sequences are kept here as they end, counts of ranks are read from their statistics when /metrics is
scraped. Knows nothing of HTTP.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from eprt.engine.outputs import STEP_TOKENS, EngineStats
from eprt.serve.series import BucketCounts, Family

_LABELS = ("model_name", "engine")
_REASONS = ("stop", "length", "abort", "error")

_LATENCY_S = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_TTFT_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75)
_TTFT_S += (1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560)
_ITL_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
# Up to the longest context there may be; shown up to the model's.
_TOKENS = tuple(mantissa * 10**exponent for exponent in range(9) for mantissa in (1, 2, 5))
_PARAMS_N = (1, 2, 5, 10, 20)

# name -> (buckets, text)
_HISTOGRAMS: dict[str, tuple[tuple[float, ...], str]] = {
    "vllm:time_to_first_token_seconds": (_TTFT_S, "From a sequence's admission to its first token"),
    "vllm:inter_token_latency_seconds": (_ITL_S, "Between two tokens of a sequence"),
    "vllm:request_time_per_output_token_seconds": (_ITL_S, "Mean of a sequence's times between two tokens"),
    "vllm:e2e_request_latency_seconds": (_LATENCY_S, "From a sequence's admission to its last token"),
    "vllm:request_queue_time_seconds": (_LATENCY_S, "Time that a sequence waited on its rank"),
    "vllm:request_inference_time_seconds": (_LATENCY_S, "From the end of its wait to its last token"),
    "vllm:request_prefill_time_seconds": (_LATENCY_S, "From the end of its wait to its first token"),
    "vllm:request_decode_time_seconds": (_LATENCY_S, "From its first token to its last"),
    "vllm:request_prompt_tokens": (_TOKENS, "Prompt tokens of a sequence"),
    "vllm:request_prefill_kv_computed_tokens": (_TOKENS, "Prompt tokens that were not in the prefix cache"),
    "vllm:request_generation_tokens": (_TOKENS, "Generated tokens of a sequence"),
    "vllm:request_params_max_tokens": (_TOKENS, "The request's max_tokens"),
    "vllm:request_max_num_generation_tokens": (_TOKENS, "Generated tokens of a prompt's longest sequence"),
    "vllm:request_params_n": (_PARAMS_N, "The request's n"),
}
# name, text, attribute of EngineStats
_GAUGES = (
    ("vllm:num_requests_running", "Sequences the rank computes", "num_running_now"),
    ("vllm:num_requests_waiting", "Sequences that wait on the rank", "num_waiting_now"),
)
_COUNTERS = (
    ("vllm:prompt_tokens", "Prompt tokens of admitted sequences", "num_prompt_tokens"),
    ("vllm:prompt_tokens_cached", "Prompt tokens found in the prefix cache", "num_cached_tokens"),
    ("vllm:generation_tokens", "Generated tokens", "num_generated_tokens"),
    ("vllm:num_preemptions", "Sequences sent back to the queue for lack of pages", "num_preemptions"),
    ("vllm:prefix_cache_queries", "Prompt tokens that were looked for in the prefix cache", "num_prompt_tokens"),
    ("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache", "num_cached_tokens"),
    ("vllm:gpu_prefix_cache_queries", "Older name of vllm:prefix_cache_queries", "num_prompt_tokens"),
    ("vllm:gpu_prefix_cache_hits", "Older name of vllm:prefix_cache_hits", "num_cached_tokens"),
)
_DRAFT_COUNTERS = (
    ("vllm:spec_decode_num_drafts", "Drafts of any number of tokens", "num_drafts"),
    ("vllm:spec_decode_num_draft_tokens", "Draft tokens", "num_drafted_tokens"),
    ("vllm:spec_decode_num_accepted_tokens", "Accepted draft tokens", "num_accepted_tokens"),
)


@dataclass(frozen=True, slots=True)
class EndedSequence:
    """What is known of a sequence when it ends."""

    reason: str  # "stop", "length" or "abort", as its client is told, or "error"
    num_prompt: int
    num_cached: int  # of these, tokens found in the prefix cache
    num_generated: int
    max_tokens: int
    started_s: float  # when it was handed to its rank (time.monotonic, as all times here)
    queued_s: float  # how long it then waited on the rank
    first_token_s: float | None  # None: it has none
    last_token_s: float | None
    ended_s: float


class VllmCounts:
    """Counts of all sequences, by the rank on which each one ended."""

    def __init__(self):
        self.histograms: defaultdict[tuple[str, int], BucketCounts] = defaultdict(BucketCounts)  # (name, rank)
        self.ended: Counter[tuple[int, str]] = Counter()  # (rank, reason)

    def observe(self, name: str, rank: int, value: float) -> None:
        counts = self.histograms[name, rank]
        counts.add_value(value, _HISTOGRAMS[name][0])

    def observe_token(self, rank: int, waited_s: float, is_first: bool) -> None:
        name = "vllm:time_to_first_token_seconds" if is_first else "vllm:inter_token_latency_seconds"
        self.observe(name, rank, waited_s)

    def observe_prompt(self, rank: int, n: int, most_generated: int) -> None:
        """All n sequences of a prompt have ended, the last one on this rank."""
        self.observe("vllm:request_params_n", rank, n)
        self.observe("vllm:request_max_num_generation_tokens", rank, most_generated)

    def observe_end(self, rank: int, ended: EndedSequence) -> None:
        self.ended[rank, ended.reason if ended.reason in _REASONS else "stop"] += 1
        for name, value in _values(ended):
            self.observe(name, rank, value)


def _values(ended: EndedSequence) -> Iterable[tuple[str, float]]:
    """What each histogram is told of the sequence. One that was never computed counts by its lengths alone."""
    yield "vllm:e2e_request_latency_seconds", ended.ended_s - ended.started_s
    yield "vllm:request_prompt_tokens", ended.num_prompt
    yield "vllm:request_generation_tokens", ended.num_generated
    yield "vllm:request_params_max_tokens", ended.max_tokens
    first_s, last_s = ended.first_token_s, ended.last_token_s
    if first_s is None or last_s is None:
        return
    running_s = ended.started_s + ended.queued_s
    yield "vllm:request_queue_time_seconds", ended.queued_s
    yield "vllm:request_prefill_time_seconds", max(0.0, first_s - running_s)
    yield "vllm:request_decode_time_seconds", last_s - first_s
    yield "vllm:request_inference_time_seconds", max(0.0, last_s - running_s)
    yield "vllm:request_prefill_kv_computed_tokens", ended.num_prompt - ended.num_cached
    if ended.num_generated > 1:
        yield "vllm:request_time_per_output_token_seconds", (last_s - first_s) / (ended.num_generated - 1)


class VllmReader:
    """Series under vLLM's names for one scrape.

    Args:
        model_name: under which the model is served.
        stats: of every rank, in rank order; a rank that has reported nothing yet is missing.
        max_model_len: of the model; None while it loads.
        page_size: tokens per KV page.
    """

    def __init__(
        self,
        counts: VllmCounts,
        model_name: str,
        num_ranks: int,
        stats: list[EngineStats],
        max_model_len: int | None,
        page_size: int,
    ):
        self._counts, self._name, self._ranks, self._stats = counts, model_name, range(num_ranks), stats
        self._max_model_len, self._page_size = max_model_len, page_size

    def read(self) -> Iterable[Metric]:
        yield from self._from_stats(GaugeMetricFamily, _GAUGES)
        yield from self._from_stats(CounterMetricFamily, _COUNTERS)
        if any(stats.num_drafted_tokens for stats in self._stats):
            yield from self._from_stats(CounterMetricFamily, _DRAFT_COUNTERS)
        yield from self._waiting_by_reason()
        yield from self._cache()
        yield from self._prompt_sources()
        yield from self._success()
        yield from self._histograms()

    def _label(self, rank: int, *more: str) -> list[str]:
        return [self._name, str(rank), *more]

    def _from_stats(self, family: Family, rows: Iterable[tuple[str, str, str]]) -> Iterable[Metric]:
        for name, text, attribute in rows:
            metric = family(name, text, labels=_LABELS)
            for stats in self._stats:
                metric.add_metric(self._label(stats.rank), getattr(stats, attribute))
            yield metric

    def _waiting_by_reason(self) -> Iterable[Metric]:
        text = "Sequences that wait on the rank for room"
        metric = GaugeMetricFamily("vllm:num_requests_waiting_by_reason", text, labels=(*_LABELS, "reason"))
        for stats in self._stats:
            metric.add_metric(self._label(stats.rank, "capacity"), stats.num_waiting_now)
            metric.add_metric(self._label(stats.rank, "deferred"), 0)
        yield metric

    def _cache(self) -> Iterable[Metric]:
        for name in ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"):
            metric = GaugeMetricFamily(name, "Part of the KV pages that sequences own, 0 to 1", labels=_LABELS)
            for stats in self._stats:
                metric.add_metric(self._label(stats.rank), stats.kv_pages_used_now / max(stats.kv_pages_total, 1))
            yield metric
        labels = (*_LABELS, "block_size", "num_gpu_blocks")
        metric = GaugeMetricFamily(
            "vllm:cache_config_info", "Tokens of a KV page, and pages of the rank", labels=labels
        )
        for stats in self._stats:
            metric.add_metric(
                self._label(stats.rank, str(stats.kv_page_tokens or self._page_size), str(stats.kv_pages_total)), 1
            )
        yield metric

    def _prompt_sources(self) -> Iterable[Metric]:
        text = "Prompt tokens, computed or found in the prefix cache"
        metric = CounterMetricFamily("vllm:prompt_tokens_by_source", text, labels=(*_LABELS, "source"))
        for stats in self._stats:
            computed = stats.num_prompt_tokens - stats.num_cached_tokens
            metric.add_metric(self._label(stats.rank, "local_compute"), computed)
            metric.add_metric(self._label(stats.rank, "local_cache_hit"), stats.num_cached_tokens)
        yield metric

    def _success(self) -> Iterable[Metric]:
        text = "Ended sequences, by how they ended"
        metric = CounterMetricFamily("vllm:request_success", text, labels=(*_LABELS, "finished_reason"))
        for rank in self._ranks:
            for reason in _REASONS:
                metric.add_metric(self._label(rank, reason), self._counts.ended[rank, reason])
        yield metric

    def _histograms(self) -> Iterable[Metric]:
        for name, (bounds, text) in _HISTOGRAMS.items():
            most = self._max_model_len if bounds is _TOKENS else None
            yield self._histogram(name, text, bounds, name, most)
        # vLLM's name until 0.10.
        name = "vllm:time_per_output_token_seconds"
        yield self._histogram(name, "Between two tokens of a sequence", _ITL_S, "vllm:inter_token_latency_seconds")
        metric = HistogramMetricFamily("vllm:iteration_tokens_total", "Tokens of the rank in a step", labels=_LABELS)
        for stats in self._stats:
            counts = BucketCounts(stats.step_token_counts, stats.num_step_tokens)
            metric.add_metric(self._label(stats.rank), counts.cumulative(STEP_TOKENS), stats.num_step_tokens)
        yield metric

    def _histogram(
        self, name: str, text: str, bounds: tuple[float, ...], source: str, most: int | None = None
    ) -> Metric:
        """source: the histogram whose counts it shows. most: values are no larger, so larger buckets are left out."""
        metric = HistogramMetricFamily(name, text, labels=_LABELS)
        for rank in self._ranks:
            counts = self._counts.histograms.get((source, rank), BucketCounts())
            metric.add_metric(self._label(rank), counts.cumulative(bounds, most), counts.total)
        return metric
