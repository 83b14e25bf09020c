"""Reading a diagnosis log: what is broken is named and counted, runs are kept apart, long logs are thinned, not cut."""

import json

import numpy as np
import pytest
from eprt.diagnostics import ExpertRows, WindowRecord, WindowWriter, analyse, read_log
from eprt.diagnostics.__main__ import main
from eprt.diagnostics.log.index import LogIndex
from eprt.diagnostics.log.reader import open_log
from eprt.diagnostics.page.log_source import LogSource
from eprt.diagnostics.synthetic import PlantedFault, SyntheticJob, generate, records_of
from eprt.diagnostics.windows.history import History
from eprt.diagnostics.windows.window_sums import WindowSums, most_kept


def records(num_ranks=4, num_windows=6, *, seed=0, first=0, start_s=0.0, faults=()) -> list[WindowRecord]:
    made = records_of(generate(SyntheticJob(num_ranks, num_windows, seed, faults=faults)))
    return [
        WindowRecord(
            **{**r.__dict__, "window": r.window + first, "t_start": r.t_start + start_s, "t_end": r.t_end + start_s}
        )
        for r in made
    ]


def write(directory, lines):
    writer = WindowWriter(directory)
    for record in lines:
        writer.write(record)
    return directory


def add_line(directory, rank, line):
    with (directory / f"diagnose_rank{rank}.log").open("a") as file:
        file.write(line + "\n")


# ---- what cannot be used --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data["dispatch_wait_us"].__setitem__(1, float("nan")), r"dispatch_wait_us\[1\]=nan"),
        (lambda data: data["combine_wait_us"].__setitem__(2, -3.5), r"combine_wait_us\[2\]=-3.5"),
        (lambda data: data["recv_tokens"].__setitem__(0, float("inf")), r"recv_tokens\[0\]=inf"),
        (lambda data: data["sent_tokens"].__setitem__(0, True), r"sent_tokens\[0\]=True"),
        (lambda data: data["sent_tokens"].__setitem__(0, "7"), r"sent_tokens\[0\]='7'"),
        (lambda data: data.__setitem__("compute_us", -1), "compute_us=-1"),
        (lambda data: data.__setitem__("window", 1.5), "window=1.5"),
        (lambda data: data.pop("node_of_rank"), "fields are missing: node_of_rank"),
        (lambda data: data.__setitem__("num_ranks", 5), "node_of_rank has 4 entries for 5 ranks"),
        (lambda data: data.__setitem__("rank", 2), "a line of rank 2 in the file of rank 1"),
    ],
)
def test_a_wrong_value_is_named_with_its_line(tmp_path, change, message):
    write(tmp_path, records())
    data = json.loads(records(first=6)[1].to_line())
    change(data)
    add_line(tmp_path, 1, json.dumps(data))
    (problem,) = read_log(tmp_path).problems
    assert problem.file.name == "diagnose_rank1.log" and problem.line == 7
    with pytest.raises(ValueError, match=message):
        raise ValueError(problem.message)


def test_a_truncated_last_line_is_named_and_the_rest_is_read(tmp_path):
    write(tmp_path, records())
    path = tmp_path / "diagnose_rank2.log"
    path.write_bytes(path.read_bytes()[:-200])
    log = read_log(tmp_path)
    assert len(log.records) == 23
    (problem,) = log.problems
    assert (problem.file, problem.line) == (path, 6) and "cut off" in problem.message


def test_a_whole_last_line_without_its_newline_counts(tmp_path):
    write(tmp_path, records())
    path = tmp_path / "diagnose_rank2.log"
    path.write_bytes(path.read_bytes()[:-1])
    assert len(read_log(tmp_path).records) == 24 and read_log(tmp_path).problems == ()
    WindowWriter(tmp_path).write(records(first=6)[2])
    assert len(read_log(tmp_path).records) == 25 and read_log(tmp_path).problems == ()


def test_the_rank_numbers_of_most_lines_are_believed(tmp_path):
    """Whichever comes first: a stray line must not cost the whole log."""
    add_line(tmp_path, 0, records(8, 1)[0].to_line().strip())
    write(tmp_path, records(4, 6, first=1))
    log = read_log(tmp_path)
    assert {record.num_ranks for record in log.records} == {4} and len(log.records) == 24
    (problem,) = log.problems
    assert problem.line == 1 and "a line of 8 ranks; most lines of this run tell of 4" in problem.message


def test_many_broken_lines_are_counted_and_only_the_first_told(tmp_path):
    write(tmp_path, records())
    for k in range(100):
        add_line(tmp_path, 3, f"garbage {k}")
    report = analyse(tmp_path)
    assert report.num_skipped == 100 and len(report.problems) == 21
    assert "80 more lines" in str(report.problems[-1]) and "diagnose_rank3.log" in str(report.problems[-1])
    assert report.to_json()["problems"]["skipped_lines"] == 100


def test_a_file_without_newlines_is_one_broken_line(tmp_path, monkeypatch):
    monkeypatch.setattr("eprt.diagnostics.log.index.MOST_LINE_BYTES", 1 << 20)
    monkeypatch.setattr("eprt.diagnostics.log.reader.MOST_LINE_BYTES", 1 << 20)
    write(tmp_path, records())
    add_line(tmp_path, 0, "x" * (3 << 20))
    WindowWriter(tmp_path).write(records(first=6)[0])
    log = read_log(tmp_path)
    assert len(log.records) == 25 and [(p.line, "without a newline" in p.message) for p in log.problems] == [(7, True)]


def test_fields_in_another_order_and_with_spaces_are_read(tmp_path):
    for record in records():
        data = json.loads(record.to_line())
        add_line(tmp_path, record.rank, json.dumps(dict(sorted(data.items()))))
    log = read_log(tmp_path)
    assert list(log.records) == sorted(records(), key=lambda r: (r.window, r.rank)) and log.problems == ()


def test_what_was_skipped_is_on_standard_error_and_in_the_json(tmp_path, capsys):
    write(tmp_path, records())
    (tmp_path / "diagnose_rank1.log").unlink()
    add_line(tmp_path, 0, "{")
    assert main([str(tmp_path), "--json"]) == 0
    streams = capsys.readouterr()
    problems = json.loads(streams.out)["problems"]
    assert problems["skipped_lines"] == 1 and len(problems["first"]) == 2
    assert "diagnose_rank0.log:7" in streams.err and "nothing from rank 1 of 4" in streams.err


# ---- runs -----------------------------------------------------------------------------------------------------------


def two_runs(directory):
    """First rank 2 is late, then, with as many windows and the same numbers, rank 1."""
    write(directory, records(8, 8, faults=(PlantedFault("column", rank=2, cause="comp", factor=3.0),)))
    second = (PlantedFault("column", rank=1, cause="comp", factor=3.0),)
    return write(directory, records(8, 6, seed=1, start_s=200.0, faults=second))


def test_runs_in_one_directory_are_kept_apart(tmp_path):
    two_runs(tmp_path)
    newest, first = analyse(tmp_path), analyse(tmp_path, run=1)
    assert [(f.kind, f.rank) for f in newest.findings] == [("column", 1)] and newest.num_windows == 6
    assert [(f.kind, f.rank) for f in first.findings] == [("column", 2)] and first.num_windows == 8
    assert newest.num_skipped == first.num_skipped == 0
    assert "started 2 times" in str(newest.problems[0]) and "run 1 is not in here" in str(newest.problems[0])
    with pytest.raises(ValueError, match="holds 2 runs; there is no run 3"):
        analyse(tmp_path, run=3)


def test_a_run_of_other_ranks_is_another_run(tmp_path):
    write(tmp_path, records(8, 5))
    write(tmp_path, records(4, 5, start_s=100.0))
    assert analyse(tmp_path).num_ranks == 4 and analyse(tmp_path, run=1).num_ranks == 8
    assert analyse(tmp_path).num_skipped == 0


def test_the_page_goes_over_to_a_run_that_begins(tmp_path):
    write(tmp_path, records(8, 8))
    source = LogSource(tmp_path)
    try:
        wait_for(lambda: source.overview()["findings"])
        assert (source.overview()["run"], source.overview()["num_runs"]) == (1, 1)
        write(tmp_path, records(8, 3, seed=1, start_s=200.0))
        wait_for(lambda: source.overview()["run"] == 2 and source.overview()["findings"]["windows"] == 3)
        overview = source.overview()
        assert overview["windows"]["window"] == [0, 1, 2] and overview["num_runs"] == 2
        expected = records(8, 3, seed=1)[0].dispatch_wait_us[1]
        assert source.window(0).planes_PNN[0, 0, 1] == pytest.approx(expected / 5800)
    finally:
        source.close()
    pinned = LogSource(tmp_path, run=1)
    try:
        wait_for(lambda: pinned.overview()["findings"])
        assert pinned.overview()["windows"]["window"] == list(range(8))
        assert pinned.window(0).planes_PNN[0, 0, 1] == pytest.approx(records(8, 8)[0].dispatch_wait_us[1] / 5800)
    finally:
        pinned.close()


def wait_for(condition):
    from tests.web.conftest import wait_until

    return wait_until(condition, "the log to be read")


def test_a_line_told_twice_is_no_new_run(tmp_path):
    write(tmp_path, records())
    add_line(tmp_path, 1, records()[1].to_line().strip())
    log = read_log(tmp_path)
    assert [p.message for p in log.problems] == ["window 0 is there twice"] and len(log.records) == 24


def test_a_rank_whose_lines_come_late_stays_in_its_run(tmp_path):
    """Ranks write nothing while they are away; their numbers go on where the others are."""
    write(tmp_path, [r for r in records(4, 9) if r.rank != 3 or r.window in (0, 7, 8)])
    index = LogIndex(tmp_path)
    index.refresh()
    assert len(index.runs) == 1 and len(read_log(tmp_path).records) == 9 * 3 + 3


# ---- long logs ------------------------------------------------------------------------------------------------------


def test_a_thinned_log_loses_nothing(tmp_path):
    """Totals over totals: several windows in one place are the average over all their calls."""
    lines = records(4, 50)
    sums = WindowSums(4, most=8)
    for record in lines:
        sums.add_record(record)
    thin, full = sums.matrices(), WindowSums.from_records(lines).matrices()
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


def test_a_long_log_is_analysed_in_the_log_s_window_numbers(tmp_path):
    most = most_kept(4)
    late = (PlantedFault("column", rank=1, cause="comp", factor=3.0, windows=(most, 2 * most)),)
    write(tmp_path, records(4, 3 * most, faults=late))
    report = analyse(tmp_path)
    assert report.num_windows == 3 * most and report.to_json()["windows_per_entry"] == 4
    finding = report.findings[0]
    assert (finding.kind, finding.rank) == ("column", 1)
    assert abs(finding.first_window - most) <= 4 and abs(finding.last_window - 2 * most) <= 4
    assert f"of {3 * most} windows" in finding.evidence
    near = analyse(tmp_path, windows=(most - 5, most + 20))
    assert near.num_windows == 26 and near.findings[0].first_window == most


def test_history_joins_windows_and_keeps_their_averages():
    lines = records(4, 40)
    apart, joined = History(4), History(4, most_rows=16)
    for record in lines:
        apart.add_record(record)
        joined.add_record(record)
    assert joined.windows() == list(range(0, 40, 4)) and joined.table()["last"] == list(range(3, 40, 4))
    assert joined.table()["ranks"] == [4] * 10
    mean_4N = apart.timeline("awaited").values_CN[4:8].mean(axis=0)
    np.testing.assert_allclose(joined.timeline("awaited").values_CN[1], mean_4N)


def test_windows_of_a_joined_row_are_added_up(tmp_path, monkeypatch):
    monkeypatch.setattr("eprt.diagnostics.page.log_source.most_rows", lambda num_ranks: 4)
    write(tmp_path, records(4, 16))
    source = LogSource(tmp_path)
    try:
        wait_for(lambda: source.overview()["findings"])
        table = source.overview()["windows"]
        assert (table["window"], table["last"]) == ([0, 4, 8, 12], [3, 7, 11, 15])
        full = WindowSums.from_records(records(4, 16)).matrices()
        expected = full.dispatch_us_WNN[4:8].mean(axis=0)
        np.testing.assert_allclose(source.window(4).planes_PNN[0], expected, rtol=1e-6)
        link = source.link(1, 2)
        assert link["first"] == list(range(16)) and link["series"]["dispatch"][5] == pytest.approx(
            full.dispatch_us_WNN[5, 1, 2], rel=1e-3
        )
        usual = np.median([full.wait_us_WNN[3, i, j] for i in range(4) for j in range(4) if i != j])
        assert link["usual"]["wait"][3] == pytest.approx(usual, rel=1e-3)
        with pytest.raises(KeyError):
            source.link(4, 0)
    finally:
        source.close()


def test_experts_of_a_thinned_log_are_those_of_its_last_window(tmp_path):
    def with_experts(record):
        rows = ExpertRows(0, (1,), ((2 * record.rank, 2 * record.rank + 1),), ((record.window, 1),))
        return WindowRecord(**{**record.__dict__, "experts": rows})

    most = most_kept(2)
    write(tmp_path, [with_experts(r) for r in records(2, most + 4)])
    report = analyse(tmp_path)
    load = report.expert_load(3)
    assert load is not None and load.slot_rows_LP.tolist() == [[7, 1, 7, 1]] and load.load_LE.tolist() == [[7, 1, 7, 1]]


def test_a_reader_takes_each_line_once_while_the_log_grows_and_rotates(tmp_path):
    lines = records(2, 40)
    size = len(lines[0].to_line())
    writer = WindowWriter(tmp_path, max_bytes=8 * size)
    for record in lines[:10]:
        writer.write(record)
    reader = open_log(tmp_path)
    seen = [(r.window, r.rank) for r, _ in reader.new_records()]
    for k in range(10, 80, 4):
        for record in lines[k : k + 4]:
            writer.write(record)
        reader.index.refresh()
        seen += [(r.window, r.rank) for r, _ in reader.new_records()]
    assert sorted(seen) == [(w, r) for w in range(40) for r in range(2)]
    assert (tmp_path / "diagnose_rank0.log.1").exists() and reader.skipped.num_lines == 0
