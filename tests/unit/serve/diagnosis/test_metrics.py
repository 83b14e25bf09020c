"""Metrics of waits and findings: series per rank, never per link."""

from prometheus_client import CollectorRegistry, generate_latest

from eprt.serve.diagnosis.diagnosis import Diagnosis
from eprt.serve.diagnosis.metrics import DiagnosisCollector
from tests.unit.serve.diagnosis.cases import N, close, metrics, totals


def test_metrics_never_grow_with_the_links():
    diagnosis = Diagnosis(N)
    before = len(metrics(diagnosis))
    close(diagnosis, *(totals(window, slow=3) for window in range(1, 6)))
    assert len(metrics(diagnosis)) - before <= 3 * N
    registry_of_many = CollectorRegistry()
    registry_of_many.register(DiagnosisCollector(Diagnosis(256), 256))
    assert len(generate_latest(registry_of_many).splitlines()) < 10 * 256
