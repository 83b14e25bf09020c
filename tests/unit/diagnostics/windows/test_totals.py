"""Totals of records: sums over the calls, averages when they are looked at."""

import numpy as np
from eprt.diagnostics.windows.totals import WindowTotals

from tests.unit.diagnostics.cases import record, synthetic_records, with_experts


def test_averages_are_total_time_over_total_calls():
    records = [record(0, 0, 2), record(0, 1, 2, num_calls=300, compute_us=0.0), record(1, 1, 2)]
    view = WindowTotals.from_records(2, records).view(None)
    assert view.number is None and (view.t_start, view.t_end) == (1000.0, 1020.0)
    np.testing.assert_allclose(view.planes_PNN[:, 0, 1], [12000 / 400, 8000 / 400, 6400 / 400])
    np.testing.assert_allclose(view.compute_us_N, [50.0, 200.0])
    assert view.calls_N.tolist() == [400, 100]


def test_a_rank_without_calls_is_a_gap():
    view = WindowTotals.from_records(2, [record(0, 5, 2), record(1, 5, 2, num_calls=0)]).view(5)
    assert view.number == 5 and np.isnan(view.planes_PNN[:, 1]).all() and np.isnan(view.compute_us_N[1])
    assert np.isfinite(view.planes_PNN[:, 0]).all()


def test_nothing_added_up_is_nothing_known():
    view = WindowTotals(3).view(None)
    assert (view.t_start, view.t_end) == (0.0, 0.0) and np.isnan(view.planes_PNN).all() and not view.calls_N.any()


def test_spans_add_up_to_what_their_records_do():
    records = synthetic_records(4, 6)
    joined = WindowTotals.from_records(4, records[:8])
    joined.append_span(WindowTotals.from_records(4, records[8:]))
    whole = WindowTotals.from_records(4, records)
    for name in ("planes_PNN", "compute_us_N", "calls_N"):
        np.testing.assert_allclose(getattr(joined, name), getattr(whole, name))
    assert (joined.t_start, joined.t_end, len(joined.windows)) == (whole.t_start, whole.t_end, 6)


def test_the_latest_experts_are_kept():
    first, second = WindowTotals(2), WindowTotals(2)
    for totals, window in ((first, 1), (first, 0), (second, 2)):
        totals.add_record(with_experts(record(0, window, 2), 4))
    assert first.experts[0][0] == 1 and not second.experts.get(1)
    first.append_span(second)
    assert {rank: window for rank, (window, _) in first.experts.items()} == {0: 2}
