"""The log as arrays: what is not given, averages over all windows, the same job seen earlier."""

import numpy as np
from eprt.diagnostics.synthetic import SyntheticJob, generate

from tests.unit.diagnostics.cases import matrices_of, record, with_experts


def test_each_entry_is_one_window_unless_something_else_is_said():
    matrices = generate(SyntheticJob(4, 3))
    assert matrices.last_window_W.tolist() == [0, 1, 2] and matrices.num_windows_W.tolist() == [1, 1, 1]
    assert np.isnan(matrices.blocked_us_WN).all() and matrices.num_ranks == 4


def test_the_mean_wait_is_total_time_over_total_calls():
    records = [record(0, 0, 2), record(0, 1, 2, num_calls=900), record(1, 0, 2), record(1, 1, 2, num_calls=0)]
    np.testing.assert_allclose(matrices_of(records).mean_wait_us_NN, [[20.0, 20.0], [100.0, 100.0]])
    silent = [record(0, 0, 2), record(1, 0, 2, num_calls=0)]
    np.testing.assert_array_equal(matrices_of(silent).mean_wait_us_NN, [[100.0, 100.0], [np.nan, np.nan]])


def test_the_first_windows_are_the_job_as_it_was_then():
    records = [with_experts(record(rank, window, 2), 0, 1) for window in range(5) for rank in range(2)]
    cut, expected = matrices_of(records).first(3), matrices_of(records[:6])
    assert cut.window_W.tolist() == [0, 1, 2] and cut.node_of_rank_N.tolist() == [0, 0]
    for name in ("start_s_W", "dispatch_us_WNN", "calls_WN", "num_windows_W", "blocked_us_WN"):
        np.testing.assert_array_equal(getattr(cut, name), getattr(expected, name))
    assert cut.experts[2, 1].experts == records[5].experts
