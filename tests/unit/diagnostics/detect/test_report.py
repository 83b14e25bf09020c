"""Reports: of a directory with whatever is in it, and of records in memory; broken lines, runs, long logs, states."""

import json

import pytest
from eprt.diagnostics import STATE_NAMES, Report, WindowWriter, analyse
from eprt.diagnostics.synthetic import SyntheticJob, generate
from eprt.diagnostics.windows.window_sums import most_kept

from tests.unit.diagnostics.cases import (
    add_line,
    late,
    matrices_of,
    places,
    record,
    synthetic_records,
    with_experts,
    write_records,
)


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


def test_many_broken_lines_are_counted_and_only_the_first_told(tmp_path):
    write_records(tmp_path, synthetic_records())
    for k in range(100):
        add_line(tmp_path, 3, f"garbage {k}")
    report = analyse(tmp_path)
    assert report.num_skipped == 100 and len(report.problems) == 21
    assert "80 more lines" in str(report.problems[-1]) and "diagnose_rank3.log" in str(report.problems[-1])
    assert report.to_json()["problems"]["skipped_lines"] == 100


def two_runs(directory):
    """First rank 2 is late, then, with as many windows and the same numbers, rank 1."""
    write_records(directory, synthetic_records(8, 8, faults=[late(2)]))
    return write_records(directory, synthetic_records(8, 6, seed=1, start_s=200.0, faults=[late(1)]))


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
    write_records(tmp_path, synthetic_records(8, 5))
    write_records(tmp_path, synthetic_records(4, 5, start_s=100.0))
    assert analyse(tmp_path).num_ranks == 4 and analyse(tmp_path, run=1).num_ranks == 8
    assert analyse(tmp_path).num_skipped == 0


def test_a_long_log_is_analysed_in_the_log_s_window_numbers(tmp_path):
    most = most_kept(4)
    write_records(tmp_path, synthetic_records(4, 3 * most, faults=[late(1, windows=(most, 2 * most))]))
    report = analyse(tmp_path)
    assert report.num_windows == 3 * most and report.to_json()["windows_per_entry"] == 4
    finding = report.findings[0]
    assert (finding.kind, finding.rank) == ("column", 1)
    assert abs(finding.first_window - most) <= 4 and abs(finding.last_window - 2 * most) <= 4
    assert f"of {3 * most} windows" in finding.evidence
    near = analyse(tmp_path, windows=(most - 5, most + 20))
    assert near.num_windows == 26 and near.findings[0].first_window == most


def test_experts_of_a_thinned_log_are_those_of_its_last_window(tmp_path):
    most = most_kept(2)
    write_records(tmp_path, [with_experts(r, 2 * r.rank, 2 * r.rank + 1) for r in synthetic_records(2, most + 4)])
    report = analyse(tmp_path)
    load = report.expert_load(3)
    assert load is not None and load.slot_rows_LP.tolist() == [[7] * 4] and load.load_LE.tolist() == [[7] * 4]


def test_a_directory_and_its_records_have_the_same_report(tmp_path):
    records = synthetic_records(8, 6, faults=[late(3)])
    report = analyse(write_records(tmp_path, records))
    assert (
        report.to_json() == Report.of_records(records).to_json() == Report.from_matrices(matrices_of(records)).to_json()
    )
    assert places(report.findings) == {("column", 3)} and (report.num_ranks, report.num_windows) == (8, 6)
    with pytest.raises(ValueError, match="no records"):
        Report.of_records([])


def test_states_tell_who_is_slow_idle_and_silent():
    idle = Report.from_matrices(generate(SyntheticJob(8, 4, 1, idle=(1, 2))))
    assert {STATE_NAMES[state] for state in idle.state_WN[:, 1]} == {"idle"} and not idle.state_WN[:, 0].any()
    records = [r for r in synthetic_records(8, 6, faults=[late(3, windows=(2, 5))]) if (r.rank, r.window) != (6, 1)]
    states = [[STATE_NAMES[state] for state in states_N] for states_N in Report.of_records(records).state_WN]
    assert [states_N[3] for states_N in states] == ["ok", "ok", "slow", "slow", "slow", "slow"]
    assert states[1][6] == "silent" and states[2][6] == "ok"


def test_the_experts_of_a_window_need_every_rank():
    records = [
        with_experts(record(rank, window, 2), 2 * rank, 2 * rank + 1) for window in range(2) for rank in range(2)
    ]
    report = Report.of_records([*records[:3], record(1, 1, 2)])
    load = report.expert_load(0)
    assert load is not None and load.physical_to_logical_LP.tolist() == [[0, 1, 2, 3]]
    assert report.expert_load(1) is None
