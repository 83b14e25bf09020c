"""From what stands out to findings: place and cause of one fault or several, and what explains itself without one."""

from dataclasses import replace

import numpy as np
import pytest
from eprt.diagnostics import Report, WindowMatrices
from eprt.diagnostics.detect.analysis import find_faults
from eprt.diagnostics.log.events import PER_RANK
from eprt.diagnostics.synthetic import PlantedFault, SyntheticJob, generate, records_of

from tests.unit.diagnostics.cases import late, link, matrices_of, places, synthetic_records


def found(job: SyntheticJob):
    return find_faults(generate(job))[1]


# ---- one fault ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_ranks", [8, 16])
@pytest.mark.parametrize("factor", [2.0, 4.0])
def test_a_late_rank_is_its_column_and_nothing_else(num_ranks, factor):
    jobs = [SyntheticJob(num_ranks, 6, seed, ranks_per_node=4, faults=(late(3, factor),)) for seed in range(20)]
    assert sum(places(found(job)) == {("column", 3)} for job in jobs) >= 18


def test_a_late_rank_is_told_from_a_slow_sender():
    (slow,) = found(SyntheticJob(8, 6, faults=(late(5, 3.0),)))
    (sender,) = found(SyntheticJob(8, 6, faults=(PlantedFault("column", rank=5, cause="comm", factor=3.0),)))
    assert (slow.kind, slow.rank, slow.cause) == ("column", 5, "comp")
    assert (sender.kind, sender.rank, sender.cause) == ("column", 5, "comm")
    assert 2.4 < slow.ratio < 3.6 and slow.confidence > 0.95 and (slow.first_window, slow.last_window) == (0, 5)
    assert "rank 5" in slow.evidence and "late" in slow.advice and "network" in sender.advice


def test_a_slow_link_is_a_point():
    (finding,) = found(SyntheticJob(16, 6, faults=(link(2, 9, 6.0),)))
    assert (finding.kind, finding.src, finding.dst, finding.rank, finding.cause) == ("point", 2, 9, None, "comm")
    (finding,) = found(SyntheticJob(16, 6, faults=(PlantedFault("point", src=2, dst=9, factor=6.0, cause="mixed"),)))
    assert finding.cause == "mixed" and "routing" in finding.advice


def test_a_rank_that_waits_for_everyone_is_a_row():
    assert places(found(SyntheticJob(8, 6, faults=tuple(link(6, j, 4.0) for j in range(8) if j != 6)))) == {("row", 6)}


@pytest.mark.parametrize("calls", [1, 3, 100_000])
def test_short_and_long_windows(calls):
    """A window has as many calls as it has; waits are per call."""
    records = [
        replace(
            r,
            num_calls=calls,
            compute_us=r.compute_us / r.num_calls * calls,
            dispatch_wait_us=tuple(v / r.num_calls * calls for v in r.dispatch_wait_us),
            combine_wait_us=tuple(v / r.num_calls * calls for v in r.combine_wait_us),
        )
        for r in synthetic_records(8, 5, seed=2, faults=[late(1)])
    ]
    (finding,) = Report.of_records(records).findings
    assert (finding.kind, finding.rank, finding.cause) == ("column", 1, "comp")


def test_a_method_that_is_none_is_refused():
    with pytest.raises(ValueError, match="method='mean': must be robust or zscore"):
        find_faults(generate(SyntheticJob(4, 2)), "mean")


# ---- several faults -------------------------------------------------------------------------------------------------


def test_two_late_ranks_are_both_found():
    assert places(found(SyntheticJob(16, 6, faults=(late(3), late(11))))) == {("column", 3), ("column", 11)}


def test_three_faults_at_once():
    faults = (late(3), PlantedFault("column", rank=9, cause="comm", factor=3.0), link(5, 12, 6.0))
    findings = found(SyntheticJob(16, 10, 4, ranks_per_node=8, faults=faults))
    assert places(findings) == {("column", 3), ("column", 9), ("point", 5, 12)}
    assert {f.rank: f.cause for f in findings if f.kind == "column"} == {3: "comp", 9: "comm"}


def test_a_slow_row_and_a_slow_column():
    faults = (PlantedFault("row", rank=2, factor=3.0), late(6))
    assert places(found(SyntheticJob(16, 8, 1, faults=faults))) == {("row", 2), ("column", 6)}


def test_a_slow_link_of_a_slow_rank_is_part_of_it():
    faults = (PlantedFault("column", rank=3, factor=3.0), link(8, 3, 5.0))
    assert places(found(SyntheticJob(16, 8, 1, faults=faults))) == {("column", 3)}


def test_the_echo_of_a_slow_link_is_named_with_the_link():
    (finding,) = found(SyntheticJob(16, 8, 1, "arrivals", faults=(link(2, 9, 8.0),)))
    assert (finding.kind, finding.src, finding.dst) == ("point", 2, 9)
    assert finding.evidence.endswith("; rank 2 is late to the others because of it")


# ---- idle and silent ranks ------------------------------------------------------------------------------------------


def without(matrices: WindowMatrices, gone) -> WindowMatrices:
    """gone(window, rank): no line of it."""
    return matrices_of([r for r in records_of(matrices) if not gone(r.window, r.rank)])


def without_calls(matrices: WindowMatrices, windows) -> WindowMatrices:
    zeros = (0,) * matrices.num_ranks
    empty = {"num_calls": 0, "compute_us": 0.0, **dict.fromkeys(PER_RANK, zeros)}
    return matrices_of([replace(r, **empty) if r.window in windows else r for r in records_of(matrices)])


def test_idle_ranks_are_no_fault_and_hide_none():
    assert found(SyntheticJob(8, 8, 1, idle=(1, 2))) == []
    assert places(found(SyntheticJob(8, 8, 1, idle=(1, 2), faults=(late(5),)))) == {("column", 5)}


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


def test_a_rank_without_data_disturbs_nobody():
    matrices = generate(SyntheticJob(8, 6, faults=(late(3, 4.0),)))
    assert places(find_faults(without(matrices, lambda w, r: r == 6))[1]) == {("column", 3)}


def test_a_rank_that_is_late_because_of_others_is_not_blamed():
    """It is waited for as much longer as it waits less, and works no longer: what made it late is elsewhere."""
    matrices = generate(SyntheticJob(8, 12, 3, cv=0.1))
    matrices.blocked_us_WN[:] = 300.0
    matrices.dispatch_us_WNN[4:, :, 5] += 80
    findings = find_faults(matrices)[1]
    assert places(findings) == {("column", 5)}, "its messages are late"
    assert all(type(value) in (float, int) for f in findings for value in (f.ratio, f.score, f.confidence)), "JSON"
    matrices.dispatch_us_WNN[4:, 5] = np.maximum(0, matrices.dispatch_us_WNN[4:, 5] - 80)
    matrices.combine_us_WNN[4:, 5] = np.maximum(0, matrices.combine_us_WNN[4:, 5] - 50)
    assert places(find_faults(matrices)[1]) == set()
    matrices.blocked_us_WN[4:, 5] -= 80
    assert places(find_faults(matrices)[1]) == {("column", 5)}, "it works longer"
