"""Metrics of the planner that starts and retires instances, read when /metrics is scraped. Knows no rule."""

from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from eprt.serve.instances.scaler import Scaler
from eprt.serve.series import series


class ScaleCollector:
    """Of one server. scaler: None where nobody plans."""

    def __init__(self, scaler: Scaler | None):
        self._scaler = scaler

    def collect(self) -> Iterable[Metric]:
        roles = {} if self._scaler is None else self._scaler.roles
        seen = [(role, scale) for role, scale in roles.items() if scale.window is not None]
        text = "Instances that the planner wants"
        yield series(GaugeMetricFamily, "eprt_scale_wanted", text, ("role",), [(r, s.wanted) for r, s in seen])
        text = "Predicted time to first token of nine prompts of ten; predicted step of the slowest decode instance"
        times = [(role, scale.window.predicted_s) for role, scale in seen if scale.window is not None]
        yield series(GaugeMetricFamily, "eprt_scale_predicted_seconds", text, ("role",), times)
        text = "Instances that the planner has had started, and retired"
        changes = [((role, "started"), scale.num_started) for role, scale in roles.items()]
        changes += [((role, "retired"), scale.num_retired) for role, scale in roles.items()]
        yield series(CounterMetricFamily, "eprt_scale_changes", text, ("role", "way"), changes)
