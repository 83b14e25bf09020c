"""Metrics of placements and migrations, read when /metrics is scraped."""

from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from eprt.serve.errors import ApiError
from eprt.serve.rebalance.rebalancer import Rebalancer


class RebalanceCollector(Collector):
    """Series of the rebalancer's state, and of what migrations cost each rank."""

    def __init__(self, rebalancer: Rebalancer):
        self._rebalancer = rebalancer

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterable[Metric]:
        rebalancer, statuses = self._rebalancer, self._rebalancer.statuses()
        try:
            epoch = rebalancer.placement.epoch
        except ApiError:
            return  # still loading, or no experts
        yield GaugeMetricFamily("eprt_placement_epoch", "Commits of placements since the start", value=epoch)
        yield GaugeMetricFamily("eprt_migration_active", "1 while experts move", value=rebalancer.is_migrating)
        latest = rebalancer.migration
        done = latest.rounds_done / max(latest.num_rounds, 1) if latest is not None else 0.0
        yield GaugeMetricFamily("eprt_migration_progress", "Part of the latest migration's rounds", value=done)
        ended = CounterMetricFamily("eprt_migrations", "Migrations by how they ended", labels=["outcome"])
        for outcome, count in rebalancer.ended.items():
            ended.add_metric([outcome], count)
        yield ended
        decided = CounterMetricFamily("eprt_rebalance_decisions", "Decisions about plans", labels=["verdict"])
        for verdict, count in rebalancer.verdicts.items():
            decided.add_metric([verdict], count)
        yield decided
        yield from self._balance()
        moved = CounterMetricFamily("eprt_migrated_experts", "Experts moved, by the way they took", labels=["way"])
        for way, count in rebalancer.moved.items():
            moved.add_metric([way], count)
        yield moved
        for family, name, text, attribute in (
            (CounterMetricFamily, "eprt_migration_sent_bytes", "Bytes of experts that the rank sent", "sent_bytes"),
            (
                CounterMetricFamily,
                "eprt_migration_received_bytes",
                "Bytes of experts that the rank received",
                "received_bytes",
            ),
            (CounterMetricFamily, "eprt_migration_seconds", "Time the rank's steps spent moving experts", "work_s"),
            (
                GaugeMetricFamily,
                "eprt_migration_max_step_seconds",
                "Largest part of that time in one step",
                "max_work_s",
            ),
            (
                GaugeMetricFamily,
                "eprt_migration_chunk_bytes",
                "Largest number of bytes sent in one step, recently",
                "chunk_bytes",
            ),
            (GaugeMetricFamily, "eprt_migration_cap_bytes", "Memory reserved for experts on the move", "cap_bytes"),
            (GaugeMetricFamily, "eprt_migration_used_bytes", "Largest part of that memory used at once", "used_bytes"),
            (
                GaugeMetricFamily,
                "eprt_migration_buffer_bytes",
                "The reserved memory with buffers for chunks",
                "buffer_bytes",
            ),
        ):
            metric = family(name, text, labels=["rank"])
            for rank, status in enumerate(statuses):
                metric.add_metric([str(rank)], getattr(status, attribute))
            yield metric

    def _balance(self) -> Iterable[Metric]:
        balance = self._rebalancer.controller.max_over_mean(self._rebalancer.placement)
        if balance is not None:
            name, text = "eprt_rank_load_max_over_mean", "Busiest rank's recent load over the mean, mean of the layers"
            yield GaugeMetricFamily(name, text, value=balance)
