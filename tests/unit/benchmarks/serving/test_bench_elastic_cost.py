"""The cost of --max-lost-ranks: ratios of neighbours in time, not of medians."""

import pytest

from benchmarks.serving.bench_elastic_cost import MeasuredServer, _cost


def test_the_cost_is_of_pairs_that_were_measured_together():
    cost = _cost("cpu", [1.1, 2.2, 3.3, 4.4], [1.0, 2.0, 3.0, 4.0])
    assert list(cost) == ["cpu_cost", "cpu_cost_low", "cpu_cost_high"]
    assert list(cost.values()) == pytest.approx([0.1] * 3)


def test_a_server_tells_the_medians_of_its_bursts():
    measured = MeasuredServer(server=None, cpu_ms=[3.0, 1.0, 2.0], wall_ms=[5.0, 4.0], idle_share=[0.01])  # type: ignore[arg-type]
    assert measured.columns() == {"cpu_ms": 2.0, "wall_ms": 4.5, "idle_cpu_share": 0.01}
