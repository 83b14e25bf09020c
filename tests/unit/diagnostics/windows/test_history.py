"""The history of ranks: averages per call over the other ranks, joined in long runs, drawn in few columns."""

from dataclasses import replace

import numpy as np
import pytest
from eprt.diagnostics.windows.history import SERIES, History, most_rows

from tests.unit.diagnostics.cases import record, synthetic_records, with_experts


def history_of(records, **options) -> History:
    history = History(records[0].num_ranks, **options)
    for one in records:
        history.add_record(one)
    return history


def test_the_series_of_a_rank():
    records = synthetic_records(4, 2)[4:]
    history = history_of(records)
    dispatch_us_NN = np.array([one.dispatch_wait_us for one in records]) / records[0].num_calls
    combine_us_NN = np.array([one.combine_wait_us for one in records]) / records[0].num_calls
    expected = {
        "awaited": (dispatch_us_NN + combine_us_NN).sum(axis=0) / 3,
        "awaited_dispatch": dispatch_us_NN.sum(axis=0) / 3,
        "awaited_combine": combine_us_NN.sum(axis=0) / 3,
        "waits": (dispatch_us_NN + combine_us_NN).sum(axis=1) / 3,
        "waits_dispatch": dispatch_us_NN.sum(axis=1) / 3,
        "waits_combine": combine_us_NN.sum(axis=1) / 3,
        "compute": [one.compute_us / one.num_calls for one in records],
        "tokens": [sum(one.recv_tokens) / one.num_calls for one in records],
        "calls": [one.num_calls for one in records],
    }
    assert list(expected) == list(SERIES)
    course = history.rank(2)
    for name, values_N in expected.items():
        np.testing.assert_allclose(history.timeline(name).values_CN, [values_N])
        assert course["series"][name] == [pytest.approx(values_N[2], abs=1e-4)]
        assert course["usual"][name] == [pytest.approx(np.median(values_N), abs=1e-4)]


def test_what_is_not_there_is_a_key_error():
    history = history_of([record()])
    for ask in (lambda: history.rank(4), lambda: history.rank(-1), lambda: history.timeline("temperature")):
        with pytest.raises(KeyError):
            ask()


def test_without_records_everything_is_empty():
    history = History(4)
    assert history.windows() == [] and history.table()["window"] == [] and history.rank(0)["first"] == []
    assert history.timeline("waits").values_CN.shape == (0, 4)


def test_a_rank_that_did_not_report_is_a_gap():
    history = history_of([record(rank) for rank in range(3)])
    assert history.table()["ranks"] == [3] and history.rank(3)["series"]["waits"] == [None]
    assert history.rank(3)["series"]["awaited"] == [100.0], "the others waited for it"
    history.add_record(record(3))
    assert history.table()["ranks"] == [4] and history.rank(3)["series"]["waits"] == [100.0], "late, and counted"


def test_a_window_without_calls_counts_as_seen_but_tells_nothing():
    history = history_of([record(rank, num_calls=0) for rank in range(4)])
    table = history.table()
    assert (table["window"], table["ranks"], table["calls"], table["peak"]) == ([0], [0], [0], [None])


def test_the_peak_is_the_most_awaited_rank_over_the_median_rank():
    records = [record(rank, dispatch_wait_us=[0.0, 6000.0, 26000.0, 6000.0]) for rank in range(4)]
    assert history_of(records).table()["peak"] == [3.0]
    assert history_of([record(0, num_ranks=1)]).table()["peak"] == [None], "one rank waits for nobody"


def test_history_joins_windows_and_keeps_their_averages():
    lines = synthetic_records(4, 40)
    apart, joined = History(4), History(4, most_rows=16)
    for one in lines:
        apart.add_record(one)
        joined.add_record(one)
    assert joined.windows() == list(range(0, 40, 4)) and joined.table()["last"] == list(range(3, 40, 4))
    assert joined.table()["ranks"] == [4] * 10
    mean_4N = apart.timeline("awaited").values_CN[4:8].mean(axis=0)
    np.testing.assert_allclose(joined.timeline("awaited").values_CN[1], mean_4N)


def test_forgotten_windows_are_gone():
    history = history_of(synthetic_records(2, 9))
    history.rows.forget_before(6)
    assert history.windows() == [6, 7, 8] and len(history.timeline("waits").first_C) == 3


def test_more_windows_than_columns_share_them_and_show_the_largest_value():
    records = [replace(one, window=w) for w in range(1500) for one in synthetic_records(2, 1)]
    records[2 * 700] = replace(records[2 * 700], compute_us=1e9)
    line = history_of(records).timeline("compute")
    assert len(line.first_C) == 500 and (line.first_C[1], line.last_C[1], line.last_C[-1]) == (3, 5, 1499)
    assert line.values_CN[:, 0].argmax() == 700 // 3


def test_migrations_are_seen_in_the_records():
    history = history_of([with_experts(record(0, window, 1), 4, 5 + window) for window in range(3)])
    assert history.migrations.to_json()["total"] == 2


def test_the_number_of_rows_kept_apart_is_bounded_by_memory():
    assert [most_rows(num_ranks) for num_ranks in (1, 64, 256, 4096)] == [4096, 4096, 1024, 256]
