"""The diagnosis log survives what happens to logs, and the analysis finds planted faults and nothing else."""

import json
import os
from dataclasses import replace

import numpy as np
import pytest
from eprt.diagnostics import ExpertRows, Report, WindowRecord, WindowWriter, analyse, read_log
from eprt.diagnostics.__main__ import main
from eprt.diagnostics.windows.window_sums import WindowSums


def record(rank: int = 0, window: int = 0, num_ranks: int = 4, **changes) -> WindowRecord:
    values = {
        "window": window,
        "t_start": 1000.0 + 10 * window,
        "t_end": 1010.0 + 10 * window,
        "rank": rank,
        "num_ranks": num_ranks,
        "node_of_rank": [0] * num_ranks,
        "num_calls": 100,
        "dispatch_wait_us": [6000.0] * num_ranks,
        "combine_wait_us": [4000.0] * num_ranks,
        "recv_tokens": [3200] * num_ranks,
        "compute_us": 20000.0,
        "sent_tokens": [3200] * num_ranks,
    }
    return WindowRecord(**{**values, **changes})


def job(
    num_ranks: int = 8,
    num_windows: int = 6,
    *,
    seed: int = 0,
    cv: float = 0.25,
    ranks_per_node: int | None = None,
    late: dict[int, float] | None = None,
    slow_sender: dict[int, float] | None = None,
    slow_link: dict[tuple[int, int], float] | None = None,
    tokens: dict[tuple[int, int], float] | None = None,
    faulty_windows: range | None = None,
) -> list[WindowRecord]:
    """A made-up job: lognormal waits (4x longer between nodes), and faults as factors on what they lengthen."""
    rng = np.random.default_rng(seed)
    node = np.arange(num_ranks) // (ranks_per_node or num_ranks)
    sigma = np.sqrt(np.log(1 + cv**2))
    records = []
    for window in range(num_windows):
        faulty = faulty_windows is None or window in faulty_windows
        wait_us_NN = 100 * np.where(node[:, None] == node[None, :], 1, 4) * rng.lognormal(0, sigma, (num_ranks,) * 2)
        compute_us_N = np.full(num_ranks, 200.0)
        tokens_NN = np.full((num_ranks, num_ranks), 32)
        for rank, factor in (late or {}).items() if faulty else ():
            wait_us_NN[:, rank] *= factor
            wait_us_NN[rank, :] /= factor
            compute_us_N[rank] *= factor
        for rank, factor in (slow_sender or {}).items() if faulty else ():
            wait_us_NN[:, rank] *= factor
        for (src, dst), factor in (slow_link or {}).items() if faulty else ():
            wait_us_NN[src, dst] *= factor
        for (src, dst), factor in (tokens or {}).items():
            tokens_NN[src, dst] *= int(factor)
        for rank in range(num_ranks):
            records.append(
                record(
                    rank,
                    window,
                    num_ranks,
                    node_of_rank=node.tolist(),
                    dispatch_wait_us=(60 * wait_us_NN[rank]).tolist(),
                    combine_wait_us=(40 * wait_us_NN[rank]).tolist(),
                    compute_us=100 * compute_us_N[rank],
                    recv_tokens=(100 * tokens_NN[rank]).tolist(),
                )
            )
    return records


def found(records: list[WindowRecord]) -> list[tuple]:
    places = [(f.kind, f.rank) if f.kind != "point" else (f.kind, f.src, f.dst) for f in findings(records)]
    return sorted(places)


def findings(records):
    return Report.of_records(records).findings


# ---- the log --------------------------------------------------------------------------------------------------------


def test_a_line_is_the_contract(tmp_path):
    WindowWriter(tmp_path).write(record(rank=2))
    (line,) = (tmp_path / "diagnose_rank2.log").read_text().splitlines()
    data = json.loads(line)
    assert data.pop("schema") == "eprt.diagnose/1"
    assert list(data) == [
        "window", "t_start", "t_end", "rank", "num_ranks", "node_of_rank", "num_calls", "dispatch_wait_us",
        "combine_wait_us", "recv_tokens", "compute_us", "sent_tokens",
    ]  # fmt: skip
    assert WindowRecord.from_line(line) == record(rank=2)


def test_expert_rows_are_an_extra_field_that_comes_back(tmp_path):
    rows = [ExpertRows(2, (1, 3), ((0, r), (-1, r)), ((5, r), (0, 7))) for r in range(2)]
    records = [record(rank, num_ranks=2, experts=rows[rank]) for rank in range(2)]
    assert json.loads(records[1].to_line())["experts"]["rows"] == [[5, 1], [0, 7]]
    assert WindowRecord.from_line(records[1].to_line()) == records[1]
    load = Report.of_records(records).expert_load(0)
    assert load is not None and load.epoch == 2 and load.layers_L.tolist() == [1, 3]
    assert load.load_LE.tolist() == [[10, 1], [7, 7]] and load.rank_of_slot_P.tolist() == [0, 0, 1, 1]
    assert load.physical_to_logical_LP.tolist() == [[0, 0, 0, 1], [-1, 0, -1, 1]]
    broken = records[1].to_line().replace('"rows":[[5,1],', '"rows":[[5],')
    with pytest.raises(ValueError, match="other shapes"):
        WindowRecord.from_line(broken)


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


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("window", "1" + 30 * "0", "window=1000000000000000000000000000000: must be an integer from 0 to"),
        ("num_ranks", "900000000", "num_ranks=900000000: must be at most 4096"),
        ("num_calls", "1" + 30 * "0", "num_calls=1000000000000000000000000000000: must be an integer from 0 to"),
        ("num_calls", "true", "num_calls=True: must be an integer"),
        ("compute_us", "1" + 400 * "0", "compute_us=an integer of 1329 bits: must be a finite number"),
        ("compute_us", "-1.5", "compute_us=-1.5: must be a finite number"),
        ("t_end", "1e300", "t_end=1e+300: must be Unix time"),
        ("recv_tokens", "[1e400,0,0,0]", "recv_tokens[0]=inf: must be a finite number"),
        ("recv_tokens", '[0,"7",0,0]', "recv_tokens[1]='7': must be a finite number"),
        ("dispatch_wait_us", "[0,0,0," + 200_000 * "[", "nested too deeply"),
        ("experts", '{"epoch":0,"layers":[1],"expert_of_slot":[[99999999999]],"rows":[[1]]}', "integers from -1 to"),
    ],
)
def test_figures_that_cannot_be_cost_only_their_line(tmp_path, field, value, message):
    """Nothing of that size, or that deep, reaches an array; and what is told of it is short."""
    writer = WindowWriter(tmp_path)
    for rank in range(4):
        writer.write(record(rank, 0))
    document = json.loads(record(0, 1).to_line())
    document[field] = "HERE"
    with (tmp_path / "diagnose_rank0.log").open("a") as file:
        file.write(json.dumps(document, separators=(",", ":")).replace('"HERE"', value) + "\n")
    report = analyse(tmp_path)
    (problem,) = report.problems
    assert message in problem.message and len(problem.message) < 120
    assert problem.line == 2 and report.num_skipped == 1 and report.num_windows == 1


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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rank": 4}, r"rank 4 is not in 0\.\.3"),
        ({"sent_tokens": [1, 2]}, "sent_tokens has 2 entries for 4 ranks"),
        ({"combine_wait_us": [1, 2, float("inf"), 4]}, r"combine_wait_us\[2\]=inf"),
        ({"recv_tokens": [1, 2, 3, -4]}, r"recv_tokens\[3\]=-4"),
        ({"num_calls": -1}, "num_calls=-1"),
        ({"t_end": 1.0}, "t_end=1.0 is before"),
    ],
)
def test_a_wrong_record_is_refused_before_it_is_written(changes, message):
    with pytest.raises(ValueError, match=message):
        record(**changes)


def test_matrices_are_per_call_and_miss_what_is_missing():
    records = [record(rank, window) for window in (4, 7) for rank in range(4) if (rank, window) != (2, 7)]
    records[0] = replace(records[0], num_calls=0)
    matrices = WindowSums.from_records(records).matrices()
    assert matrices.window_W.tolist() == [4, 7]
    assert matrices.dispatch_us_WNN[0, 1, 0] == 60 and matrices.wait_us_WNN[1, 3, 2] == 100
    assert matrices.recv_tokens_WNN[1, 0, 0] == 32 and matrices.compute_us_WN[0, 1] == 200
    assert np.isnan(matrices.wait_us_WNN[1, 2]).all() and np.isnan(matrices.compute_us_WN[1, 2])
    assert np.isnan(matrices.wait_us_WNN[0, 0]).all(), "no call, no average"


# ---- the analysis ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 7, 8, 16, 32])
def test_a_clean_job_has_no_finding(num_ranks):
    for seed in range(10):
        assert found(job(num_ranks, seed=seed)) == []
    assert found(job(num_ranks, ranks_per_node=4, seed=99)) == [], "slower links between nodes are no fault"


@pytest.mark.parametrize("num_ranks", [8, 16])
@pytest.mark.parametrize("factor", [2.0, 4.0])
def test_a_late_rank_is_its_column_and_nothing_else(num_ranks, factor):
    exact = 0
    for seed in range(20):
        exact += found(job(num_ranks, seed=seed, late={3: factor}, ranks_per_node=4)) == [("column", 3)]
    assert exact >= 18


def test_a_late_rank_is_told_from_a_slow_sender():
    (late,) = findings(job(late={5: 3.0}))
    (sender,) = findings(job(slow_sender={5: 3.0}))
    assert (late.kind, late.rank, late.cause) == ("column", 5, "comp")
    assert (sender.kind, sender.rank, sender.cause) == ("column", 5, "comm")
    assert 2.4 < late.ratio < 3.6 and late.confidence > 0.95 and (late.first_window, late.last_window) == (0, 5)
    assert "rank 5" in late.evidence and "late" in late.advice and "network" in sender.advice


def test_two_late_ranks_are_both_found():
    assert found(job(16, late={3: 3.0, 11: 3.0})) == [("column", 3), ("column", 11)]


def test_a_slow_link_is_a_point():
    (finding,) = findings(job(16, slow_link={(2, 9): 6.0}))
    assert (finding.kind, finding.src, finding.dst, finding.rank, finding.cause) == ("point", 2, 9, None, "comm")
    (finding,) = findings(job(16, slow_link={(2, 9): 6.0}, tokens={(2, 9): 5}))
    assert finding.cause == "mixed" and "routing" in finding.advice


def test_a_rank_that_waits_for_everyone_is_a_row():
    links = {(6, j): 4.0 for j in range(8) if j != 6}
    assert found(job(8, slow_link=links)) == [("row", 6)]


def test_a_passing_fault_is_dated():
    (finding,) = findings(job(8, 12, late={1: 4.0}, faulty_windows=range(4, 8)))
    assert (finding.kind, finding.rank) == ("column", 1)
    assert (finding.first_window, finding.last_window) == (4, 7) and "4 of 12 windows" in finding.evidence


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_few_ranks_name_only_the_one_all_wait_for(num_ranks):
    (finding,) = findings(job(num_ranks, late={1: 4.0}))
    assert (finding.kind, finding.rank) == ("column", 1)


def test_a_rank_without_data_disturbs_nobody():
    records = [r for r in job(8, late={3: 4.0}) if r.rank != 6]
    assert found(records) == [("column", 3)]


# ---- the command ----------------------------------------------------------------------------------------------------


def write_all(directory, records):
    writer = WindowWriter(directory)
    for one in records:
        writer.write(one)


def test_exit_status_and_json(tmp_path, capsys):
    write_all(tmp_path / "clean", job(8))
    write_all(tmp_path / "late", job(8, late={3: 3.0}))
    assert main([str(tmp_path / "clean"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "schema": "eprt.findings/1", "num_ranks": 8, "windows": 6, "windows_per_entry": 1, "findings": [],
        "problems": {"skipped_lines": 0, "first": []},
    }  # fmt: skip
    assert main([str(tmp_path / "late"), "--json"]) == 1
    (finding,) = json.loads(capsys.readouterr().out)["findings"]
    assert set(finding) == {
        "kind", "rank", "src", "dst", "cause", "score", "ratio", "first_window", "last_window", "confidence",
        "evidence", "advice",
    }  # fmt: skip
    assert main([str(tmp_path / "late"), "--text"]) == 1
    text = capsys.readouterr().out
    assert "column rank 3" in text and "8 ranks, 6 windows" in text


def test_unreadable_input_is_status_2(tmp_path, capsys):
    assert main([str(tmp_path / "missing")]) == 2 and "missing" in capsys.readouterr().err
    assert main([str(tmp_path)]) == 2 and "holds no diagnose_rank*.log" in capsys.readouterr().err
    (tmp_path / "diagnose_rank0.log").write_text("garbage\n")
    assert main([str(tmp_path)]) == 2
    assert "diagnose_rank0.log:1: " in capsys.readouterr().err


def test_a_broken_line_is_reported_on_standard_error(tmp_path, capsys):
    write_all(tmp_path, job(4))
    with (tmp_path / "diagnose_rank1.log").open("a") as file:
        file.write("{\n")
    assert main([str(tmp_path), "--json"]) == 0
    streams = capsys.readouterr()
    assert "diagnose_rank1.log:7: " in streams.err and json.loads(streams.out)["windows"] == 6


def test_bursts_in_every_third_window_are_told_one_by_one():
    found = Report.of_records(job(num_windows=12, late={3: 8.0}, faulty_windows=range(2, 12, 3))).findings
    assert {(f.kind, f.rank, f.cause) for f in found} == {("column", 3, "comp")}
    assert sorted((f.first_window, f.last_window) for f in found) == [(2, 2), (5, 5), (8, 8), (11, 11)]
