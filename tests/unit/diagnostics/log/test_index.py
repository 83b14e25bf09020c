"""The index finds every line and its window, keeps runs apart, and keeps up with a log that grows and rotates."""

import json
import os

import pytest
from eprt.diagnostics import WindowWriter, read_log
from eprt.diagnostics.log.files import UNKNOWN
from eprt.diagnostics.log.index import LogIndex
from eprt.diagnostics.log.reader import open_log

from tests.unit.diagnostics.cases import add_line, record, synthetic_records, write_records


def index_of(directory) -> LogIndex:
    index = LogIndex(directory)
    index.refresh()
    return index


def test_lines_are_found_by_their_window(tmp_path):
    (file,) = index_of(write_records(tmp_path, [record(0, window, 1) for window in range(5)])).files
    assert file.windows.tolist() == list(range(5)) and file.find_lines(1, 3) == [1, 2, 3]
    lines = [record(0, window, 1).to_line().encode() for window in (2, 3)]
    assert [line for _, line in file.read_lines(range(2, 4))] == lines and list(file.read_lines([])) == []


def test_only_what_was_appended_is_read(tmp_path):
    index = index_of(write_records(tmp_path, [record(0, 0, 1)]))
    assert not index.refresh()
    add_line(tmp_path, 0, "{")
    assert index.refresh() and index.files[0].windows.tolist() == [0, UNKNOWN]
    assert index.num_bytes == (tmp_path / "diagnose_rank0.log").stat().st_size


def test_an_unfinished_line_waits_for_its_end(tmp_path):
    line = record(0, 1, 1).to_line()
    index = index_of(write_records(tmp_path, [record(0, 0, 1)]))
    with (tmp_path / "diagnose_rank0.log").open("a") as file:
        file.write(line[:50])
        file.flush()
        assert not index.refresh() and index.files[0].num_lines == 1
        file.write(line[50:])
    assert index.refresh() and index.files[0].windows.tolist() == [0, 1]


def test_a_rotated_file_is_known_again_and_a_rewritten_one_is_not(tmp_path):
    index = index_of(write_records(tmp_path, [record(0, window, 1) for window in range(3)]))
    (file,) = index.files
    path = tmp_path / "diagnose_rank0.log"
    path.rename(tmp_path / "diagnose_rank0.log.1")
    with pytest.raises(OSError):
        list(file.read_lines([0]))
    WindowWriter(tmp_path).write(record(0, 3, 1))
    assert index.refresh() and index.files[0] is file and len(index.files) == 2
    assert [one.windows.tolist() for one in index.files] == [[0, 1, 2], [3]]
    path.write_text(record(0, 9, 1).to_line())
    index.refresh()
    assert index.files[0] is file and index.files[1].windows.tolist() == [9]


def test_fields_in_another_order_and_with_spaces_are_read(tmp_path):
    for one in synthetic_records():
        data = json.loads(one.to_line())
        add_line(tmp_path, one.rank, json.dumps(dict(sorted(data.items()))))
    log = read_log(tmp_path)
    assert list(log.records) == sorted(synthetic_records(), key=lambda r: (r.window, r.rank)) and log.problems == ()


def test_a_job_that_is_started_again_is_another_run(tmp_path):
    write_records(tmp_path, synthetic_records(4, 5))
    write_records(tmp_path, synthetic_records(8, 3, start_s=100.0))
    first, second = index_of(tmp_path).runs
    assert (first.number, first.num_ranks, first.first_window, first.last_window) == (1, 4, 0, 4)
    assert (second.number, second.num_ranks, second.first_window, second.last_window) == (2, 8, 0, 2)
    assert first.parts == {(rank, 0) for rank in range(4)}
    assert second.parts == {(rank, int(rank < 4)) for rank in range(8)}


def test_a_run_that_continues_the_numbers_is_the_same_run(tmp_path):
    write_records(tmp_path, synthetic_records(4, 5))
    (run,) = index_of(write_records(tmp_path, synthetic_records(4, 5, first=5, start_s=1e6))).runs
    assert (run.first_window, run.last_window) == (0, 9)


def test_a_rank_whose_lines_come_late_stays_in_its_run(tmp_path):
    """Ranks write nothing while they are away; their numbers go on where the others are."""
    write_records(tmp_path, [r for r in synthetic_records(4, 9) if r.rank != 3 or r.window in (0, 7, 8)])
    assert len(index_of(tmp_path).runs) == 1 and len(read_log(tmp_path).records) == 9 * 3 + 3


def test_what_is_not_a_file_is_told_and_left_alone(tmp_path):
    os.mkfifo(tmp_path / "diagnose_rank0.log")
    index = LogIndex(tmp_path)
    assert not index.refresh() and index.refused == [tmp_path / "diagnose_rank0.log"] and not index.files
    with pytest.raises(ValueError, match=r"diagnose_rank0\.log is not a regular file"):
        open_log(tmp_path)
