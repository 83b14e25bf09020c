"""Metrics of the ranks, read from their latest statistics when /metrics is scraped.

Label sets are bounded: ranks, model layers, and experts only up to _MAX_EXPERT_SERIES series (a large model's load per
expert is at /v1/eprt/load; here it shows as load per rank and as skew). Knows nothing of requests (request_metrics.py).
"""

from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from eprt.config import EngineConfig
from eprt.serve.options import ServeOptions
from eprt.serve.ranks.expert_load import expert_load
from eprt.serve.ranks.pool import RankPool
from eprt.serve.ranks.vllm_metrics import VllmReader
from eprt.serve.series import series, series_per_rank

_MAX_EXPERT_SERIES = 4096
# name, text, attribute of EngineStats
GAUGES = (
    ("eprt_requests_running", "Sequences the rank computes", "num_running_now"),
    ("eprt_queue_length", "Sequences that wait on the rank", "num_waiting_now"),
    ("eprt_kv_pages_used", "KV pages owned by sequences", "kv_pages_used_now"),
    ("eprt_kv_pages", "All KV pages", "kv_pages_total"),
    ("eprt_kv_bytes_per_token", "Bytes of the KV cache that each further token of a sequence takes", "kv_token_bytes"),
    ("eprt_kv_longest_context", "Tokens of the longest sequence that model and KV cache allow", "kv_longest_context"),
    ("eprt_last_step_seconds", "Duration of the latest step", "last_step_s"),
)
COUNTERS = (
    ("eprt_steps", "Steps that computed", "num_steps"),
    ("eprt_device_gaps", "Pauses of the GPU between two steps", "num_gaps"),
    ("eprt_device_gap_seconds", "Sum of these pauses: the GPU waited for the host", "gap_s"),
    ("eprt_two_batch_steps", "Steps with two-batch overlap", "num_two_batch_steps"),
    ("eprt_single_batch_steps", "Steps with single-batch overlap", "num_single_batch_steps"),
    ("eprt_split_prompt_steps", "Steps in which the rank and others computed a prompt together", "num_split_steps"),
    ("eprt_prompt_tokens", "Prompt tokens of admitted sequences", "num_prompt_tokens"),
    ("eprt_generated_tokens", "Generated tokens", "num_generated_tokens"),
    ("eprt_cached_tokens", "Prompt tokens found in the prefix cache", "num_cached_tokens"),
    ("eprt_preemptions", "Sequences sent back to the queue for lack of pages", "num_preemptions"),
    ("eprt_drafted_tokens", "Tokens that the MTP layer drafted and a step checked", "num_drafted_tokens"),
    ("eprt_accepted_tokens", "Drafted tokens that were accepted", "num_accepted_tokens"),
)


def team_series(engine: EngineConfig) -> Metric:
    """How many ranks share attention by heads, and how they join what they compute; 1: each computes its own."""
    text = "Ranks that share attention by heads (--attention-tp), 1 where each computes its own"
    values = [(engine.attention_tp_form, engine.attention_tp)]
    return series(GaugeMetricFamily, "eprt_attention_tp_ranks", text, ("form",), values)


class RankCollector:
    """One series per rank, layer or expert from the pool's state."""

    def __init__(self, pool: RankPool, options: ServeOptions):
        self._pool, self._options = pool, options

    def collect(self) -> Iterable[Metric]:
        pool = self._pool
        yield GaugeMetricFamily("eprt_up", "1 while new requests are taken", value=pool.state == "serving")
        yield GaugeMetricFamily("eprt_sequences", "Sequences handed to the ranks and not ended", pool.num_sequences)
        yield team_series(self._options.engine)
        yield from series_per_rank(COUNTERS, GAUGES, ((stats.rank, stats) for stats in pool.stats))
        yield from self._expert_load()
        yield from self._under_vllms_names()

    def _under_vllms_names(self) -> Iterable[Metric]:
        pool, options = self._pool, self._options
        max_model_len = pool.limits.max_model_len if pool.limits else None
        counts, page_size = pool.metrics.vllm, options.engine.page_size
        return VllmReader(counts, options.model_name, pool.num_ranks, pool.stats, max_model_len, page_size).read()

    def _expert_load(self) -> Iterable[Metric]:
        layers = expert_load(self._pool.infos, self._pool.stats)
        loads = [((one.layer, rank), count) for one in layers for rank, count in enumerate(one.per_rank)]
        text = "Tokens that its experts received"
        yield series(CounterMetricFamily, "eprt_rank_expert_tokens", text, ("layer", "rank"), loads)
        skews = [(one.layer, one.skew) for one in layers]
        text = "Largest rank's share over the mean rank's"
        yield series(GaugeMetricFamily, "eprt_expert_skew", text, ("layer",), skews)
        if sum(len(one.per_expert) for one in layers) <= _MAX_EXPERT_SERIES:
            loads = [((one.layer, expert), count) for one in layers for expert, count in enumerate(one.per_expert)]
            text = "Tokens that chose the expert"
            yield series(CounterMetricFamily, "eprt_expert_tokens", text, ("layer", "expert"), loads)
