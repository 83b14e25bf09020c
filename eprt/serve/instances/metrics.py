"""Metrics of a server's instances, read when /metrics is scraped.

Ranks are numbered over all instances, in the order of the flags; eprt_instance_ranks says whose they are. Knows nothing
of requests (ranks/request_metrics.py).
"""

from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily

from eprt.serve.instances.fleet import Fleet
from eprt.serve.instances.instance import STATES
from eprt.serve.options import ServeOptions
from eprt.serve.ranks.metrics import COUNTERS, GAUGES, team_series
from eprt.serve.ranks.vllm_metrics import VllmReader
from eprt.serve.series import series, series_per_rank

# name, text, attribute of EngineStats
_GAUGES = (
    ("eprt_requests_held", "Requests whose pages another instance has still to read", "num_held_now"),
    ("eprt_requests_arriving", "Requests of other instances whose pages are not all here", "num_arriving_now"),
)
_COUNTERS = (("eprt_pulled_pages", "KV pages read from other instances", "num_pulled_pages"),)


class InstanceCollector:
    """Series of one server's instances, and of their ranks."""

    def __init__(self, fleet: Fleet, options: ServeOptions):
        self._fleet, self._options = fleet, options

    def collect(self) -> Iterable[Metric]:
        fleet, stats = self._fleet, self._fleet.stats
        yield GaugeMetricFamily("eprt_up", "1 while new requests are taken", value=fleet.state == "serving")
        yield GaugeMetricFamily("eprt_sequences", "Sequences handed to the ranks and not ended", fleet.num_sequences)
        yield team_series(self._options.engine)
        reports = [(each.rank, each) for each in stats]
        yield from series_per_rank((*COUNTERS, *_COUNTERS), (*GAUGES, *_GAUGES), reports)
        yield from self._instances()
        yield from self._handoffs()
        max_model_len = fleet.limits.max_model_len if fleet.limits else None
        name, page_size = self._options.model_name, self._options.engine.page_size
        yield from VllmReader(fleet.metrics.vllm, name, fleet.num_ranks, stats, max_model_len, page_size).read()

    def _instances(self) -> Iterable[Metric]:
        there = self._fleet.instances.values()
        states = [((one, one.role, state), one.state == state) for one in there for state in STATES]
        text = "1 for the state that the instance is in"
        yield series(GaugeMetricFamily, "eprt_instance_state", text, ("instance", "role", "state"), states)
        ranks = [((one, one.first_rank + rank), 1) for one in there for rank in range(one.name.num_ranks)]
        text = "1 for each rank of the instance"
        yield series(GaugeMetricFamily, "eprt_instance_ranks", text, ("instance", "rank"), ranks)
        living = self._fleet.living
        for name, text, values in (
            ("eprt_instance_sequences", "Sequences that are there", [(one, one.pool.num_sequences) for one in living]),
            (
                "eprt_instance_tokens",
                "Tokens of these sequences",
                [(one, sum(one.pool.router.num_tokens)) for one in living],
            ),
            (
                "eprt_instance_prefill_tokens_per_second",
                "Measured speed",
                [(one, one.rate.tokens_per_s) for one in living],
            ),
            (
                "eprt_instance_predicted_step_seconds",
                "Of its slowest rank",
                [(one, one.forecast.step_s()) for one in living],
            ),
        ):
            yield series(GaugeMetricFamily, name, text, ("instance",), values)
        yield CounterMetricFamily("eprt_instances_lost", "Instances lost while others served on", self._fleet.num_lost)

    def _handoffs(self) -> Iterable[Metric]:
        counts = self._fleet.handoffs.counts
        under_way = len(self._fleet.handoffs.offers)
        yield GaugeMetricFamily("eprt_handoffs_under_way", "Requests between two instances", under_way)
        outcomes = [("done", counts.num_done), ("failed", counts.num_failed), ("late", counts.num_late)]
        text = "Requests that went from one instance to another; failed and late ones were computed again"
        yield series(CounterMetricFamily, "eprt_handoffs", text, ("outcome",), outcomes)
        pages = [("pulled", counts.num_pulled), ("shared", counts.num_shared)]
        text = "Pages of these requests: copied, or in the other instance's prefix cache"
        yield series(CounterMetricFamily, "eprt_handoff_pages", text, ("way",), pages)
        text = "From the first token until the other instance goes on"
        yield SummaryMetricFamily("eprt_handoff_seconds", text, counts.num_done, counts.wait_s)
        text = "Sequences that went on on another rank than theirs"
        yield CounterMetricFamily("eprt_requests_replayed", text, counts.num_replayed)
