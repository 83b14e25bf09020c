"""Series of a metric, for collectors that are read when /metrics is scraped. Knows nothing of what is counted."""

from collections.abc import Iterable
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

Family = type[CounterMetricFamily | GaugeMetricFamily]
Rows = Iterable[tuple[str, str, str]]  # (name, text, attribute) of metrics


def series(
    family: Family, name: str, text: str, labels: tuple[str, ...], values: Iterable[tuple[Any, float]]
) -> Metric:
    """One metric. values: each with its labels' values, a tuple where there are several labels."""
    metric = family(name, text, labels=labels)
    for key, value in values:
        metric.add_metric([str(label) for label in (key if isinstance(key, tuple) else (key,))], value)
    return metric


def series_per_rank(counters: Rows, gauges: Rows, reports: Iterable[tuple[int, Any]]) -> Iterable[Metric]:
    """Each metric from one attribute of the ranks' reports. reports: (rank, report)."""
    reports = list(reports)
    for family, rows in ((CounterMetricFamily, counters), (GaugeMetricFamily, gauges)):
        for name, text, attribute in rows:
            yield series(family, name, text, ("rank",), ((rank, getattr(each, attribute)) for rank, each in reports))
