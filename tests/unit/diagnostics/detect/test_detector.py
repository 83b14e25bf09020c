"""The analysis at its ends: 2 to 256 ranks, one window and many, silence, several faults, onset and recovery."""

import json

import numpy as np
import pytest
from eprt.diagnostics import Report, WindowRecord, WindowWriter, analyse
from eprt.diagnostics.__main__ import main
from eprt.diagnostics.detect.analysis import find_faults
from eprt.diagnostics.synthetic import PlantedFault, SyntheticJob, generate, records_of
from eprt.diagnostics.windows.matrices import WindowMatrices
from eprt.diagnostics.windows.window_sums import WindowSums


def matrices_of(records) -> WindowMatrices:
    return WindowSums.from_records(records).matrices()


def late(rank, factor=3.0, windows=None):
    return PlantedFault("column", rank=rank, cause="comp", factor=factor, windows=windows)


def link(src, dst, factor=5.0, windows=None):
    return PlantedFault("point", src=src, dst=dst, factor=factor, windows=windows)


def places(findings):
    return {(f.kind, f.rank) if f.kind != "point" else (f.kind, f.src, f.dst) for f in findings}


def found(job):
    return find_faults(generate(job))[1]


# ---- numbers of ranks and windows -----------------------------------------------------------------------------------


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 5, 7, 8, 16, 33, 64, 128, 256])
def test_a_late_rank_among_any_number(num_ranks):
    (finding,) = found(SyntheticJob(num_ranks, 5, 1, faults=(late(num_ranks - 1, 4.0),)))
    assert (finding.kind, finding.rank, finding.cause) == ("column", num_ranks - 1, "comp")
    assert 2.5 < finding.ratio < 25 and finding.first_window == 0 and finding.last_window == 4
    assert found(SyntheticJob(num_ranks, 5, 1)) == []


def test_one_rank_waits_for_nobody():
    assert found(SyntheticJob(1, 4)) == []


@pytest.mark.parametrize("num_windows", [1, 2, 3, 6, 30, 300])
def test_any_number_of_windows(num_windows):
    assert places(found(SyntheticJob(8, num_windows, 3, faults=(late(5),)))) == {("column", 5)}
    assert found(SyntheticJob(8, num_windows, 3)) == []


def test_a_point_among_256_ranks_on_many_nodes():
    assert places(found(SyntheticJob(256, 6, 2, ranks_per_node=8, faults=(link(17, 200, 6.0),)))) == {
        ("point", 17, 200)
    }


@pytest.mark.parametrize("calls", [1, 3, 100_000])
def test_short_and_long_windows(calls):
    """A window has as many calls as it has; waits are per call."""
    records = [
        WindowRecord(
            **{
                **r.__dict__,
                "num_calls": calls,
                "compute_us": r.compute_us / r.num_calls * calls,
                "dispatch_wait_us": tuple(v / r.num_calls * calls for v in r.dispatch_wait_us),
                "combine_wait_us": tuple(v / r.num_calls * calls for v in r.combine_wait_us),
            }
        )
        for r in records_of(generate(SyntheticJob(8, 5, 2, faults=(late(1),))))
    ]  # fmt: skip
    (finding,) = Report.of_records(records).findings
    assert (finding.kind, finding.rank, finding.cause) == ("column", 1, "comp")


# ---- silence --------------------------------------------------------------------------------------------------------


def without(matrices: WindowMatrices, gone) -> WindowMatrices:
    """gone(window, rank): no line of it."""
    return matrices_of([r for r in records_of(matrices) if not gone(r.window, r.rank)])


def without_calls(matrices: WindowMatrices, windows) -> WindowMatrices:
    def silent(r):
        zeros = (0,) * r.num_ranks
        empty = {n: zeros for n in ("dispatch_wait_us", "combine_wait_us", "recv_tokens", "sent_tokens")}
        return WindowRecord(**{**r.__dict__, **empty, "num_calls": 0, "compute_us": 0.0})

    return matrices_of([silent(r) if r.window in windows else r for r in records_of(matrices)])


def test_idle_ranks_are_no_fault_and_hide_none():
    assert found(SyntheticJob(8, 8, 1, idle=(1, 2))) == []
    assert places(found(SyntheticJob(8, 8, 1, idle=(1, 2), faults=(late(5),)))) == {("column", 5)}
    state_WN = Report.from_matrices(generate(SyntheticJob(8, 4, 1, idle=(1, 2)))).state_WN
    assert (state_WN[:, 1] == 3).all() and (state_WN[:, 0] == 0).all()


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 8, 16])
@pytest.mark.parametrize("num_busy", [1, 2, 3])
def test_the_few_ranks_that_have_requests_are_waited_for_and_that_is_no_fault(num_ranks, num_busy):
    """One user of a large server: idle ranks come to every exchange at once, and wait for his."""
    busy = range(1, min(num_ranks, 1 + num_busy))
    idle = tuple(sorted({*range(num_ranks)} - {*busy}))
    for seed in range(3):
        matrices = generate(SyntheticJob(num_ranks, 8, seed, idle=idle, noise="arrivals"))
        busy_wait = np.isin(np.arange(num_ranks), busy) * 120.0
        matrices.dispatch_us_WNN[:] += np.where(np.isin(np.arange(num_ranks), idle)[:, None], busy_wait, 0.0)
        assert find_faults(matrices)[1] == []


@pytest.mark.parametrize("num_ranks", [4, 8])
def test_requests_on_half_of_the_ranks_are_no_fault(num_ranks):
    idle = tuple(range(0, num_ranks, 2))
    for seed in range(10):
        matrices = generate(SyntheticJob(num_ranks, 8, seed, idle=idle, noise="arrivals"))
        is_idle = np.isin(np.arange(num_ranks), idle)
        matrices.dispatch_us_WNN[:] += 900.0 * (is_idle[:, None] & ~is_idle[None, :])
        assert find_faults(matrices)[1] == []


def test_a_late_rank_is_told_from_the_others_that_have_requests():
    job = SyntheticJob(8, 8, 1, idle=(0, 3, 4, 5, 6, 7), noise="arrivals", faults=(late(2, 8.0),))
    assert ("column", 2) in places(found(job))


def test_a_single_witness_is_named_as_one():
    (finding,) = find_faults(without(generate(SyntheticJob(8, 8, 1, faults=(late(5),))), lambda w, r: r != 2))[1]
    assert (finding.kind, finding.rank) == ("column", 5)
    assert finding.evidence.endswith("; only rank 2 tells, so it may be the link between the two")
    assert "tells" not in found(SyntheticJob(8, 8, 1, faults=(late(5),)))[0].evidence


def test_windows_without_calls_say_nothing():
    matrices = generate(SyntheticJob(8, 12, 1, faults=(late(5),)))
    findings = find_faults(without_calls(matrices, {3, 4, 9}))[1]
    assert places(findings) == {("column", 5)} and (findings[0].first_window, findings[0].last_window) == (0, 11)
    assert find_faults(without_calls(matrices, set(range(12))))[1] == []
    assert (Report.from_matrices(without_calls(matrices, {3})).state_WN[3] == 4).all()


def test_a_rank_that_falls_silent_disturbs_nobody():
    matrices = generate(SyntheticJob(8, 12, 1, faults=(late(5),)))
    assert places(find_faults(without(matrices, lambda w, r: r == 2 and w >= 4))[1]) == {("column", 5)}
    assert find_faults(without(generate(SyntheticJob(8, 12, 1)), lambda w, r: r in (2, 6) and w % 3))[1] == []


def test_waits_of_zero_and_equal_waits_have_no_finding():
    matrices = generate(SyntheticJob(8, 6))
    zeros = np.zeros_like(matrices.dispatch_us_WNN)
    parts = {**matrices.__dict__, "dispatch_us_WNN": zeros, "combine_us_WNN": zeros}
    assert find_faults(WindowMatrices(**parts))[1] == []
    assert find_faults(WindowMatrices(**{**parts, "dispatch_us_WNN": zeros + 50.0}))[1] == []


# ---- several faults -------------------------------------------------------------------------------------------------


def test_three_faults_at_once():
    faults = (late(3), PlantedFault("column", rank=9, cause="comm", factor=3.0), link(5, 12, 6.0))
    findings = found(SyntheticJob(16, 10, 4, ranks_per_node=8, faults=faults))
    assert places(findings) == {("column", 3), ("column", 9), ("point", 5, 12)}
    assert {f.rank: f.cause for f in findings if f.kind == "column"} == {3: "comp", 9: "comm"}


def test_a_slow_row_and_a_slow_column():
    faults = (PlantedFault("row", rank=2, factor=3.0), late(6))
    assert places(found(SyntheticJob(16, 8, 1, faults=faults))) == {("row", 2), ("column", 6)}


def test_faults_one_after_the_other():
    findings = found(SyntheticJob(8, 20, 2, faults=(late(1, windows=(2, 7)), late(6, windows=(12, 17)))))
    assert {f.rank: (f.first_window, f.last_window) for f in findings} == {1: (2, 7), 6: (12, 17)}


def test_a_fault_that_comes_back_is_told_twice():
    findings = found(SyntheticJob(8, 24, 2, faults=(late(1, windows=(2, 6)), late(1, windows=(15, 20)))))
    assert sorted((f.rank, f.first_window, f.last_window) for f in findings) == [(1, 2, 6), (1, 15, 20)]


# ---- persistence, onset, recovery -----------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_onset_and_recovery_are_dated_to_a_window(seed):
    (finding,) = found(SyntheticJob(16, 20, seed, faults=(late(4, windows=(6, 13)),)))
    assert abs(finding.first_window - 6) <= 1 and abs(finding.last_window - 13) <= 1
    assert "then recovered" in finding.evidence and f"from {10 * finding.first_window} s" in finding.evidence
    (finding,) = found(SyntheticJob(16, 20, seed, faults=(late(4, windows=(6, 19)),)))
    assert "to the end" in finding.evidence


def test_one_window_s_hiccup_is_no_fault_but_a_burst_is_told():
    """What passes within a window is reported only when it is far out."""
    assert found(SyntheticJob(16, 12, 1, faults=(late(4, 1.7, windows=(5, 5)),))) == []
    (finding,) = found(SyntheticJob(16, 12, 1, faults=(late(4, 8.0, windows=(5, 5)),)))
    assert (finding.rank, finding.first_window, finding.last_window) == (4, 5, 5)


def test_a_fault_is_reported_two_windows_after_its_onset():
    matrices = generate(SyntheticJob(16, 12, 1, faults=(late(4, windows=(5, 11)),)))
    seen = [bool(find_faults(matrices.first(num))[1]) for num in range(1, 13)]
    assert seen.index(True) <= 6 and all(seen[7:])


# ---- the plain z-score ----------------------------------------------------------------------------------------------


def test_the_plain_z_score_is_an_option(tmp_path, capsys):
    """Five times, and more than ten ranks: what it takes for mean and deviation to show it."""
    writer = WindowWriter(tmp_path)
    for record in records_of(generate(SyntheticJob(32, 6, 1, faults=(late(7, 8.0),)))):
        writer.write(record)
    report = analyse(tmp_path, method="zscore")
    assert ("column", 7) in places(report.findings)
    others = np.delete(report.outliers.column_z_WN, 7, axis=1)
    assert (report.outliers.column_z_WN[:, 7] > 3).all() and others.max() < 3
    assert main([str(tmp_path), "--json", "--method", "zscore"]) == 1
    assert json.loads(capsys.readouterr().out)["findings"] == [f.to_json() for f in report.findings]
    assert main([str(tmp_path), "--text", "--method", "robust"]) == 1
    with pytest.raises(ValueError, match="method='mean': must be robust or zscore"):
        analyse(tmp_path, method="mean")


def test_the_plain_z_score_is_what_its_name_says():
    matrices = generate(SyntheticJob(6, 1, 3))
    outliers, _ = find_faults(matrices, "zscore")
    wait_us_NN = np.where(np.eye(6, dtype=bool), np.nan, matrices.wait_us_WNN[0])
    column_N = np.nanmean(wait_us_NN, axis=0)
    np.testing.assert_allclose(outliers.column_z_WN[0], (column_N - column_N.mean()) / column_N.std())
    np.testing.assert_allclose(
        outliers.row_ratio_WN[0], np.nanmean(wait_us_NN, axis=1) / np.nanmean(wait_us_NN, 1).mean()
    )
    z_NN = (wait_us_NN - np.nanmean(wait_us_NN)) / np.nanstd(wait_us_NN)
    np.testing.assert_allclose(outliers.point_z_WNN[0], z_NN)


@pytest.mark.parametrize("num_ranks", [4, 8, 10])
def test_no_column_of_few_ranks_can_reach_three_standard_deviations(num_ranks):
    """sqrt(N - 1): the fault widens the deviation it is measured by. Medians have no such bound."""
    matrices = generate(SyntheticJob(num_ranks, 4, 1, faults=(late(1, 100.0),)))
    assert np.nanmax(find_faults(matrices, "zscore")[0].column_z_WN) <= np.sqrt(num_ranks - 1)
    assert ("column", 1) not in places(find_faults(matrices, "zscore")[1])
    assert places(find_faults(matrices)[1]) == {("column", 1)}
