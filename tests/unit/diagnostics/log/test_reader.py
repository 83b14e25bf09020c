"""Reading a log: every usable line once, in order; what cannot be used is named with file and line, and counted."""

import gzip
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from eprt.diagnostics import WindowLog, WindowWriter, read_log
from eprt.diagnostics.log.reader import open_log

from tests.unit.diagnostics.cases import add_line, record, synthetic_records, with_experts, write_records


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data["dispatch_wait_us"].__setitem__(1, float("nan")), "dispatch_wait_us[1]=nan"),
        (lambda data: data["combine_wait_us"].__setitem__(2, -3.5), "combine_wait_us[2]=-3.5"),
        (lambda data: data["recv_tokens"].__setitem__(0, float("inf")), "recv_tokens[0]=inf"),
        (lambda data: data["sent_tokens"].__setitem__(0, True), "sent_tokens[0]=True"),
        (lambda data: data["sent_tokens"].__setitem__(0, "7"), "sent_tokens[0]='7'"),
        (lambda data: data.__setitem__("compute_us", -1), "compute_us=-1"),
        (lambda data: data.__setitem__("window", 1.5), "window=1.5"),
        (lambda data: data.pop("node_of_rank"), "fields are missing: node_of_rank"),
        (lambda data: data.__setitem__("num_ranks", 5), "node_of_rank has 4 entries for 5 ranks"),
        (lambda data: data.__setitem__("rank", 2), "a line of rank 2 in the file of rank 1"),
    ],
)
def test_a_wrong_value_is_named_with_its_line(tmp_path, change, message):
    write_records(tmp_path, synthetic_records())
    data = json.loads(synthetic_records(first=6)[1].to_line())
    change(data)
    add_line(tmp_path, 1, json.dumps(data))
    (problem,) = read_log(tmp_path).problems
    assert problem.file.name == "diagnose_rank1.log" and problem.line == 7
    assert message in problem.message


def test_a_truncated_last_line_is_named_and_the_rest_is_read(tmp_path):
    write_records(tmp_path, synthetic_records())
    path = tmp_path / "diagnose_rank2.log"
    path.write_bytes(path.read_bytes()[:-200])
    log = read_log(tmp_path)
    assert len(log.records) == 23
    (problem,) = log.problems
    assert (problem.file, problem.line) == (path, 6) and "cut off" in problem.message


def test_a_whole_last_line_without_its_newline_counts(tmp_path):
    write_records(tmp_path, synthetic_records())
    path = tmp_path / "diagnose_rank2.log"
    path.write_bytes(path.read_bytes()[:-1])
    assert len(read_log(tmp_path).records) == 24 and read_log(tmp_path).problems == ()
    WindowWriter(tmp_path).write(synthetic_records(first=6)[2])
    assert len(read_log(tmp_path).records) == 25 and read_log(tmp_path).problems == ()


def test_the_rank_numbers_of_most_lines_are_believed(tmp_path):
    """Whichever comes first: a stray line must not cost the whole log."""
    add_line(tmp_path, 0, synthetic_records(8, 1)[0].to_line().strip())
    write_records(tmp_path, synthetic_records(4, 6, first=1))
    log = read_log(tmp_path)
    assert {one.num_ranks for one in log.records} == {4} and len(log.records) == 24
    (problem,) = log.problems
    assert problem.line == 1 and "a line of 8 ranks; most lines of this run tell of 4" in problem.message


def test_a_file_without_newlines_is_one_broken_line(tmp_path, monkeypatch):
    monkeypatch.setattr("eprt.diagnostics.log.files.MOST_LINE_BYTES", 1 << 20)
    monkeypatch.setattr("eprt.diagnostics.log.reader.MOST_LINE_BYTES", 1 << 20)
    write_records(tmp_path, synthetic_records())
    add_line(tmp_path, 0, "x" * (3 << 20))
    WindowWriter(tmp_path).write(synthetic_records(first=6)[0])
    log = read_log(tmp_path)
    assert len(log.records) == 25 and [(p.line, "without a newline" in p.message) for p in log.problems] == [(7, True)]


def test_a_line_told_twice_is_no_new_run(tmp_path):
    write_records(tmp_path, synthetic_records())
    add_line(tmp_path, 1, synthetic_records()[1].to_line().strip())
    log = read_log(tmp_path)
    assert [p.message for p in log.problems] == ["window 0 is there twice"] and len(log.records) == 24


def test_a_reader_takes_each_line_once_while_the_log_grows_and_rotates(tmp_path):
    lines = synthetic_records(2, 40)
    size = len(lines[0].to_line())
    writer = WindowWriter(tmp_path, max_bytes=8 * size)
    for one in lines[:10]:
        writer.write(one)
    reader = open_log(tmp_path)
    seen = [(r.window, r.rank) for r, _ in reader.new_records()]
    for k in range(10, 80, 4):
        for one in lines[k : k + 4]:
            writer.write(one)
        reader.index.refresh()
        seen += [(r.window, r.rank) for r, _ in reader.new_records()]
    assert sorted(seen) == [(w, r) for w in range(40) for r in range(2)]
    assert (tmp_path / "diagnose_rank0.log.1").exists() and reader.skipped.num_lines == 0


def test_what_is_written_is_read_back_in_order(tmp_path):
    writer = WindowWriter(tmp_path)
    written = [record(rank, window) for window in range(3) for rank in (3, 0, 1, 2)]
    for one in written:
        writer.write(one)
    log = read_log(tmp_path)
    assert list(log.records) == sorted(written, key=lambda r: (r.window, r.rank)) and log.problems == ()


def test_broken_lines_are_named_and_skipped(tmp_path):
    WindowWriter(tmp_path).write(record(0, 0))
    path = tmp_path / "diagnose_rank0.log"
    good = record(0, 1).to_line()
    wrong_length = good.replace('"window":1', '"window":2').replace("[6000.0,6000.0,6000.0,6000.0]", "[6000.0]")
    foreign = record(1, 3).to_line()
    twice = record(0, 0).to_line()
    other_schema = good.replace("eprt.diagnose/1", "eprt.diagnose/9")
    nan = good.replace("20000.0", "NaN")
    with path.open("a") as file:
        file.writelines(["{not json\n", wrong_length, foreign, twice, other_schema, nan, "[1]\n", good])
    log = read_log(tmp_path)
    assert [r.window for r in log.records] == [0, 1]
    *lines, silent = log.problems
    assert [(p.file, p.line) for p in lines] == [(path, n) for n in range(2, 9)]
    assert "dispatch_wait_us has 1 entries for 4 ranks" in lines[1].message
    assert "rank 1 in the file of rank 0" in lines[2].message
    assert "window 0 is there twice" in lines[3].message
    assert "eprt.diagnose/9" in lines[4].message
    assert "compute_us=nan" in lines[5].message
    assert "nothing from rank 1, 2, 3 of 4" in silent.message


def test_only_the_windows_asked_for_are_read(tmp_path):
    reader = open_log(write_records(tmp_path, synthetic_records(2, 9)), windows=(3, 5))
    assert sorted((r.window, r.rank) for r, _ in reader.new_records()) == [(w, r) for w in (3, 4, 5) for r in range(2)]
    assert reader.problems() == []
    with pytest.raises(ValueError, match="has the windows 0 to 8, and none of those asked for"):
        open_log(tmp_path, windows=(9, 20))


def test_windows_that_were_read_are_read_again(tmp_path):
    lines = synthetic_records(2, 6)
    reader = open_log(write_records(tmp_path, lines))
    assert list(reader.records(0, 9)) == [], "nothing was read before"
    assert len(list(reader.new_records())) == 12
    add_line(tmp_path, 0, lines[4].to_line().strip())
    add_line(tmp_path, 1, lines[5].to_line().strip())
    reader.index.refresh()
    assert list(reader.new_records()) == [] and reader.skipped.num_lines == 2
    assert sorted(reader.records(2, 3), key=lambda r: (r.window, r.rank)) == lines[4:8], "each once"


def test_a_line_is_read_again_from_its_place(tmp_path):
    lines = [with_experts(record(0, window, 1), 3, 1) for window in range(2)]
    reader = open_log(write_records(tmp_path, lines))
    (_, first), (_, second) = reader.new_records()
    assert first.read() == lines[0] and second.experts == lines[1].experts
    (tmp_path / "diagnose_rank0.log").unlink()
    assert first.read() is None and second.experts is None


def test_a_rank_that_changes_its_node_is_a_problem(tmp_path):
    write_records(tmp_path, [record(0, 0, 2), record(1, 0, 2), record(1, 1, 2, node_of_rank=[0, 1])])
    (problem,) = read_log(tmp_path).problems
    assert problem.line == 2 and problem.message == "rank 1 is on node 1; in the lines before: 0"


def test_a_directory_without_a_usable_line_says_why(tmp_path):
    with pytest.raises(ValueError, match="holds no diagnose_rank"):
        open_log(tmp_path)
    (tmp_path / "diagnose_rank0.log").write_text("garbage\n\n" + record(0, 0).to_line()[:30])
    with pytest.raises(ValueError) as error:
        open_log(tmp_path)
    reason = str(error.value)
    assert "no usable line" in reason and "diagnose_rank0.log:1: " in reason and ":3: the line is cut off" in reason


@pytest.mark.parametrize("position", [0, 4, 11])
def test_one_absurd_window_number_costs_one_line(tmp_path, position):
    """It used to end the run: eight of twelve windows were dropped, and a false column was named."""
    lines = synthetic_records(num_windows=12)
    for one in lines:
        absurd = (one.window, one.rank) == (position, 2)
        add_line(tmp_path, one.rank, (replace(one, window=10**12) if absurd else one).to_line().strip())
    log = read_log(tmp_path)
    assert len(log.records) == 47 and {one.window for one in log.records} == set(range(12))
    (problem,) = log.problems
    assert (problem.file.name, problem.line) == ("diagnose_rank2.log", position + 1)
    assert "window 1000000000000" in problem.message


def test_clocks_an_hour_apart_are_one_run_at_one_time(tmp_path):
    """They used to split it into as many runs as there were clocks, though the window numbers agree."""
    for one in synthetic_records(num_windows=6):
        moved = replace(one, t_start=one.t_start + 3600 * one.rank, t_end=one.t_end + 3600 * one.rank)
        add_line(tmp_path, one.rank, moved.to_line().strip())
    log = read_log(tmp_path)
    assert len(log.records) == 24
    assert max(one.t_end for one in log.records) - min(one.t_start for one in log.records) == pytest.approx(60)
    assert [p.message for p in log.problems] == [
        f"the clock of rank {rank} is {3600 * rank} s ahead of rank 0's: its times are moved" for rank in (1, 2, 3)
    ]


def test_a_run_that_one_rank_missed_is_not_mixed_with_the_next(tmp_path):
    write_records(tmp_path, [one for one in synthetic_records() if one.rank != 3])
    write_records(tmp_path, synthetic_records(start_s=1000, seed=1))
    assert len(open_log(tmp_path).index.runs) == 2


def test_a_pipe_among_the_files_is_named_and_the_others_are_read(tmp_path):
    write_records(tmp_path, [one for one in synthetic_records() if one.rank != 2])
    os.mkfifo(tmp_path / "diagnose_rank2.log")
    log = read_log(tmp_path)
    assert len(log.records) == 18
    assert [p.message for p in log.problems] == ["is not a regular file: skipped", "nothing from rank 2 of 4"]


def test_packed_files_are_read(tmp_path):
    lines = write_records(tmp_path, synthetic_records()) and read_log(tmp_path).records
    for rank in (1, 3):
        path = tmp_path / f"diagnose_rank{rank}.log"
        Path(f"{path}.gz").write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()
    assert read_log(tmp_path) == WindowLog(lines, ())
    reader = open_log(tmp_path)
    assert len(list(reader.new_records())) == 24 and not reader.index.refresh()
    assert len(list(reader.records(2, 3))) == 8


def test_an_older_packed_file_comes_before_the_current_one(tmp_path):
    write_records(tmp_path, synthetic_records(num_windows=3))
    for path in tmp_path.glob("*.log"):
        Path(f"{path}.1.gz").write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()
    write_records(tmp_path, synthetic_records(num_windows=3, first=3, start_s=30))
    log = read_log(tmp_path)
    assert len(log.records) == 24 and log.problems == ()


def test_a_packed_file_that_was_cut_off_gives_what_it_has(tmp_path):
    write_records(tmp_path, synthetic_records())
    path = tmp_path / "diagnose_rank1.log"
    packed = gzip.compress(path.read_bytes())
    Path(f"{path}.gz").write_bytes(packed[: len(packed) * 2 // 3])
    path.unlink()
    log = read_log(tmp_path)
    assert 18 < len(log.records) < 24
    assert any("cannot be unpacked further" in p.message for p in log.problems)
