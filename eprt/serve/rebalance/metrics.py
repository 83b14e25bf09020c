"""Metrics of placements and migrations, read when /metrics is scraped."""

from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from eprt.serve.errors import ApiError
from eprt.serve.rebalance.rebalancer import Rebalancer
from eprt.serve.series import series, series_per_rank

# name, text, attribute of MigrationStatus
_COUNTERS = (
    ("eprt_migration_sent_bytes", "Bytes of experts that the rank sent", "sent_bytes"),
    ("eprt_migration_received_bytes", "Bytes of experts that the rank received", "received_bytes"),
    ("eprt_migration_seconds", "Time the rank's steps spent moving experts", "work_s"),
)
_GAUGES = (
    ("eprt_migration_max_step_seconds", "Largest part of that time in one step", "max_work_s"),
    ("eprt_migration_chunk_bytes", "Largest number of bytes sent in one step, recently", "chunk_bytes"),
    ("eprt_migration_cap_bytes", "Memory reserved for experts on the move", "cap_bytes"),
    ("eprt_migration_used_bytes", "Largest part of that memory used at once", "used_bytes"),
    ("eprt_migration_buffer_bytes", "The reserved memory with buffers for chunks", "buffer_bytes"),
)


class RebalanceCollector:
    """Series of the rebalancer's state, and of what migrations cost each rank."""

    def __init__(self, rebalancer: Rebalancer):
        self._rebalancer = rebalancer

    def collect(self) -> Iterable[Metric]:
        rebalancer = self._rebalancer
        try:
            placement = rebalancer.placement
        except ApiError:
            return  # still loading, or no experts
        yield GaugeMetricFamily("eprt_placement_epoch", "Commits of placements since the start", placement.epoch)
        yield GaugeMetricFamily("eprt_migration_active", "1 while experts move", rebalancer.is_migrating)
        latest = rebalancer.migration
        done = latest.rounds_done / max(latest.num_rounds, 1) if latest is not None else 0.0
        yield GaugeMetricFamily("eprt_migration_progress", "Part of the latest migration's rounds", done)
        for name, text, label, counts in (
            ("eprt_migrations", "Migrations by how they ended", "outcome", rebalancer.ended),
            ("eprt_rebalance_decisions", "Decisions about plans", "verdict", rebalancer.verdicts),
            ("eprt_migrated_experts", "Experts moved, by the way they took", "way", rebalancer.moved),
        ):
            yield series(CounterMetricFamily, name, text, (label,), counts.items())
        balance = rebalancer.controller.max_over_mean(placement)
        if balance is not None:
            text = "Busiest rank's recent load over the mean, mean of the layers"
            yield GaugeMetricFamily("eprt_rank_load_max_over_mean", text, balance)
        yield from series_per_rank(_COUNTERS, _GAUGES, enumerate(rebalancer.statuses()))
