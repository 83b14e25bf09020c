"""Sums over windows: averages per call, gaps where nothing is known, and nothing lost where windows share a span."""

from dataclasses import replace

import numpy as np
import pytest
from eprt.diagnostics.log.reader import open_log
from eprt.diagnostics.log.standing import LoggedProcess, Standing
from eprt.diagnostics.windows.window_sums import LINK_SERIES, WindowSums, most_kept

from tests.unit.diagnostics.cases import matrices_of, record, synthetic_records, with_experts, write_records


def test_a_thinned_log_loses_nothing():
    """Totals over totals: several windows in one place are the average over all their calls."""
    lines = synthetic_records(4, 50)
    sums = WindowSums(4, most=8)
    for one in lines:
        sums.add_record(one)
    thin, full = sums.matrices(), matrices_of(lines)
    assert thin.num_windows_W.sum() == 50 and len(thin.window_W) == 7
    assert thin.window_W.tolist() == list(range(0, 50, 8)) and thin.last_window_W.tolist() == [*range(7, 50, 8), 49]
    assert thin.num_windows_W.tolist() == [8] * 6 + [2]
    np.testing.assert_allclose(thin.wait_us_WNN[1], full.wait_us_WNN[8:16].mean(axis=0))
    np.testing.assert_allclose((thin.calls_WN).sum(axis=0), full.calls_WN.sum(axis=0))
    np.testing.assert_allclose(thin.start_s_W, full.start_s_W[::8])
    shuffled = WindowSums(4, most=8)
    for k in np.random.default_rng(0).permutation(len(lines)):
        shuffled.add_record(lines[k])
    np.testing.assert_allclose(shuffled.matrices().wait_us_WNN, thin.wait_us_WNN)


def test_usage_is_per_call_and_missing_where_one_window_lacks_it():
    lines = [replace(record(rank, w), usage={"cpu_us": 500.0, "steps": 5}) for w in range(4) for rank in range(4)]
    lines[0] = replace(lines[0], usage=None)
    calls = lines[1].num_calls
    full = matrices_of(lines)
    assert sorted(full.usage_WN) == ["cpu_us", "steps"]
    assert full.usage_WN["cpu_us"][0, 1] == 500 / calls and np.isnan(full.usage_WN["steps"][0, 0])
    sums = WindowSums(4, most=2)
    for one in lines:
        sums.add_record(one)
    thin = sums.matrices()
    assert thin.usage_WN["cpu_us"].shape == (2, 4) and np.isnan(thin.usage_WN["cpu_us"][0, 0])
    assert thin.usage_WN["cpu_us"][1, 0] == 500 / calls
    assert full.first(2).usage_WN["cpu_us"].shape == (2, 4)


def test_processes_and_standings_are_kept_also_of_ranks_without_calls():
    lines = [record(rank, w) for w in range(3) for rank in range(4)]
    stood = Standing(5.0, None, "", 0.0, "stopped")
    lines[6] = replace(lines[6], num_calls=0, standing=stood, process=LoggedProcess("h", 12))
    matrices = matrices_of(lines)
    assert matrices.standings == {(1, 2): (stood, lines[6].t_end)} and matrices.processes == {2: LoggedProcess("h", 12)}
    assert matrices.first(1).standings == {} and matrices.first(2).standings == matrices.standings


def test_matrices_are_per_call_and_miss_what_is_missing():
    records = [record(rank, window) for window in (4, 7) for rank in range(4) if (rank, window) != (2, 7)]
    records[0] = replace(records[0], num_calls=0)
    matrices = matrices_of(records)
    assert matrices.window_W.tolist() == [4, 7]
    assert matrices.dispatch_us_WNN[0, 1, 0] == 60 and matrices.wait_us_WNN[1, 3, 2] == 100
    assert matrices.recv_tokens_WNN[1, 0, 0] == 32 and matrices.compute_us_WN[0, 1] == 200
    assert np.isnan(matrices.wait_us_WNN[1, 2]).all() and np.isnan(matrices.compute_us_WN[1, 2])
    assert np.isnan(matrices.wait_us_WNN[0, 0]).all(), "no call, no average"


def test_of_a_line_that_comes_twice_the_last_counts():
    (matrices, expected) = (matrices_of([record(), record(num_calls=50)]), matrices_of([record(num_calls=50)]))
    np.testing.assert_array_equal(matrices.dispatch_us_WNN, expected.dispatch_us_WNN)
    assert matrices.dispatch_us_WNN[0, 0, 1] == 120


def test_blocked_time_is_known_where_every_line_of_the_span_has_it():
    sums = WindowSums(2, most=1)
    for one in (record(0, 0, 2, blocked_us=500.0), record(1, 0, 2, blocked_us=700.0), record(1, 1, 2)):
        sums.add_record(one)
    np.testing.assert_array_equal(sums.matrices().blocked_us_WN, [[5.0, np.nan]])


def test_experts_are_kept_or_read_again_when_they_are_asked_for(tmp_path):
    sums = WindowSums(2)
    sums.add_record(with_experts(record(0, 0, 2), 4))
    reader = open_log(write_records(tmp_path, [with_experts(record(1, 0, 2), 5)]))
    for one, place in reader.new_records():
        sums.add_record(one, place)
    experts = sums.matrices().experts
    rows = [experts[0, rank].experts for rank in range(2)]
    assert [one is not None and one.expert_of_slot for one in rows] == [((4,),), ((5,),)]
    (tmp_path / "diagnose_rank1.log").unlink()
    assert experts[0, 0].experts is not None and experts[0, 1].experts is None


def test_the_course_of_a_link_stands_beside_its_tier():
    lines = [replace(one, node_of_rank=(0, 0, 1, 1)) for one in synthetic_records(4, 3)]
    course, matrices = WindowSums.from_records(lines).link(1, 2), matrices_of(lines)
    assert (course["src"], course["dst"], course["first"], course["last"]) == (1, 2, [0, 1, 2], [0, 1, 2])
    assert list(course["series"]) == list(course["usual"]) == list(LINK_SERIES)
    np.testing.assert_allclose(course["series"]["combine"], matrices.combine_us_WNN[:, 1, 2], rtol=1e-4)
    between = [matrices.wait_us_WNN[1, i, j] for i in range(4) for j in range(4) if i // 2 != j // 2]
    assert course["usual"]["wait"][1] == pytest.approx(np.median(between), rel=1e-4)


@pytest.mark.parametrize(("src", "dst"), [(4, 0), (0, 4), (-1, 0)])
def test_a_link_that_is_not_there(src, dst):
    with pytest.raises(KeyError):
        WindowSums.from_records(synthetic_records(4, 1)).link(src, dst)


def test_without_a_record_there_are_no_matrices():
    with pytest.raises(ValueError, match="no records"):
        WindowSums(4).matrices()
    with pytest.raises(ValueError, match="no records"):
        WindowSums.from_records([])
    assert len(WindowSums(4).total().windows) == 0


def test_the_total_is_the_sum_of_all_spans():
    lines = synthetic_records(4, 20)
    sums = WindowSums(4, most=6)
    for one in lines:
        sums.add_record(one)
    total = sums.total()
    assert len(total.windows) == 20 and (total.t_start, total.t_end) == (lines[0].t_start, lines[-1].t_end)
    expected_us = [sum(one.dispatch_wait_us[2] for one in lines if one.rank == rank) for rank in range(4)]
    np.testing.assert_allclose(total.planes_PNN[0, :, 2], expected_us)


def test_the_number_of_windows_kept_apart_is_bounded_by_memory():
    assert [most_kept(num_ranks) for num_ranks in (1, 8, 32, 256, 4096)] == [256, 256, 192, 24, 6]
