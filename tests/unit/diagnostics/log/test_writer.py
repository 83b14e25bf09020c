"""The writer keeps a log readable and bounded, whatever stops it; a new run continues or puts the old log aside."""

import os

import pytest
from eprt.diagnostics import WindowWriter, read_log

from tests.unit.diagnostics.cases import record, write_records


def test_a_line_cut_off_by_a_crash_costs_only_itself(tmp_path):
    WindowWriter(tmp_path).write(record(0, 0, num_ranks=1))
    path = tmp_path / "diagnose_rank0.log"
    with path.open("a") as file:
        file.write(record(0, 1, num_ranks=1).to_line()[:40])
    WindowWriter(tmp_path).write(record(0, 2, num_ranks=1))
    log = read_log(tmp_path)
    assert [r.window for r in log.records] == [0, 2]
    assert [p.line for p in log.problems] == [2]


def test_rotation_bounds_the_size_and_keeps_the_newest(tmp_path):
    size = len(record(0, 10).to_line())
    writer = WindowWriter(tmp_path, max_bytes=5 * size)
    for window in range(10, 33):
        writer.write(record(0, window))
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 10 * size
    windows = [r.window for r in read_log(tmp_path).records]
    assert windows == list(range(windows[0], 33)) and len(windows) >= 6, "the newest, without a gap"


def test_a_full_disk_leaves_no_half_line(tmp_path, monkeypatch):
    writer = WindowWriter(tmp_path)
    writer.write(record(0, 0, num_ranks=1))
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:10]))
    with pytest.raises(OSError, match="disk full"):
        writer.write(record(0, 1, num_ranks=1))
    monkeypatch.undo()
    writer.write(record(0, 2, num_ranks=1))
    log = read_log(tmp_path)
    assert [r.window for r in log.records] == [0, 2] and log.problems == ()


def test_a_run_of_the_same_ranks_continues_after_the_last_window(tmp_path):
    assert WindowWriter(tmp_path).first_window == 0
    write_records(tmp_path, [record(0, 7, 2), record(1, 6, 2)])
    writer = WindowWriter(tmp_path)
    assert writer.new_run(2, [0, 0]) is None and writer.first_window == 8


@pytest.mark.parametrize(("num_ranks", "node_of_rank"), [(3, [0, 0, 0]), (2, [0, 1])])
def test_a_log_of_other_ranks_or_nodes_is_put_aside(tmp_path, num_ranks, node_of_rank):
    (tmp_path / "earlier-1").mkdir()
    write_records(tmp_path, [record(rank, 4, 2) for rank in range(2)])
    writer = WindowWriter(tmp_path)
    assert writer.new_run(num_ranks, node_of_rank) == tmp_path / "earlier-2" and writer.first_window == 0
    assert [r.window for r in read_log(tmp_path / "earlier-2").records] == [4, 4]


def test_the_last_usable_line_tells_where_to_go_on(tmp_path):
    write_records(tmp_path, [record(0, 3, 1)])
    with (tmp_path / "diagnose_rank0.log").open("a") as file:
        file.write("{broken\n" + record(0, 9, 1).to_line()[:30])
    assert WindowWriter(tmp_path).first_window == 4


def test_a_bound_below_a_byte_is_refused(tmp_path):
    with pytest.raises(ValueError, match="max_bytes=0: must be at least 1"):
        WindowWriter(tmp_path, max_bytes=0)
