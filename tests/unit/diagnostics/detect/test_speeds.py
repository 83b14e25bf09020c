"""rank_speeds: a slow rank is given less load for as long as it is slow, and nobody else is."""

from dataclasses import replace

import numpy as np
import pytest
from eprt.diagnostics import Report, rank_speeds
from eprt.diagnostics.synthetic import PlantedFault, SyntheticJob, generate, records_of

from tests.unit.diagnostics.cases import late, synthetic_records

N = 8


def report(*faults: PlantedFault, num_windows: int = 12, **changes) -> Report:
    return Report.of_records(
        records_of(generate(SyntheticJob(num_ranks=N, num_windows=num_windows, faults=faults, **changes)))
    )


def others(speeds_N: np.ndarray, rank: int) -> np.ndarray:
    return np.delete(speeds_N, rank)


def test_without_findings_all_ranks_are_as_fast():
    assert rank_speeds(report()).tolist() == [1.0] * N


@pytest.mark.parametrize("factor", [2.0, 4.0])
def test_a_rank_that_computes_longer_is_slower_by_as_much(factor):
    found = report(PlantedFault("column", rank=3, factor=factor, cause="comp"), noise="arrivals")
    assert [f.rank for f in found.findings] == [3]
    matrices = found.matrices
    compute_N = matrices.compute_us_WN[-6:].mean(axis=0)
    speeds_N = rank_speeds(found)
    assert speeds_N[3] == pytest.approx(np.median(compute_N) / compute_N[3], rel=0.1)
    assert (others(speeds_N, 3) == 1.0).all()


def test_a_rank_whose_messages_are_late_is_slower():
    speeds_N = rank_speeds(report(PlantedFault("column", rank=5, factor=4.0, cause="comm")))
    assert 0.2 <= speeds_N[5] <= 0.9 and (others(speeds_N, 5) == 1.0).all()


def test_load_is_nobodys_fault_and_neither_is_a_link():
    load = report(PlantedFault("column", rank=2, factor=3.0, cause="mixed"))
    assert load.findings and rank_speeds(load).tolist() == [1.0] * N
    link = report(PlantedFault("point", src=1, dst=6, factor=6.0, cause="comm"))
    assert link.findings and rank_speeds(link).tolist() == [1.0] * N


def test_a_slow_rank_with_less_load_stays_slow_until_it_has_recovered():
    """Half of the tokens in as much time as the others take: nobody waits for it, so there is no finding any more."""
    records = records_of(generate(SyntheticJob(num_ranks=N, num_windows=8)))
    matrices = Report.of_records(records).matrices
    matrices.recv_tokens_WNN[:, 3] /= 2
    relieved = Report.from_matrices(matrices)
    assert not relieved.findings
    assert rank_speeds(relieved).tolist() == [1.0] * N, "nobody knows that it was slow"
    before_N = np.where(np.arange(N) == 3, 0.5, 1.0)
    speeds_N = rank_speeds(relieved, before_N)
    assert speeds_N[3] == pytest.approx(0.5, rel=0.1) and (others(speeds_N, 3) == 1.0).all()
    assert rank_speeds(report(), before_N).tolist() == [1.0] * N, "it has recovered"


@pytest.mark.parametrize(("cause", "factor", "remembered"), [("comp", 2.0, False), ("comm", 4.0, True)])
def test_window_by_window_a_late_rank_gets_its_load_back_and_late_messages_are_remembered(cause, factor, remembered):
    """Slow from the fourth window to the eighth. With less load late messages are not waited for, though nothing is
    mended; late compute shows in the time per token."""
    job = SyntheticJob(
        num_ranks=N,
        num_windows=16,
        faults=(PlantedFault("column", rank=3, factor=factor, cause=cause, windows=(4, 8)),),
    )
    matrices, speeds_N, slow = generate(job), np.ones(N), []
    for num in range(2, 17):
        speeds_N = rank_speeds(Report.from_matrices(matrices.first(num)), speeds_N)
        assert (others(speeds_N, 3) == 1.0).all()
        slow += [num] if speeds_N[3] < 0.9 else []
    assert set(range(6, 10)) <= set(slow) and (slow[-1] == 16) == remembered, slow


def test_a_rank_with_few_tokens_recovers_where_time_does_not_grow_with_them():
    """Reading the weights takes as long for half of the tokens: its time per token is twice the usual at any time."""
    fault = PlantedFault("column", rank=3, factor=4.0, cause="comp", windows=(4, 8))
    matrices, speeds_N = generate(SyntheticJob(num_ranks=N, num_windows=14, faults=(fault,))), np.ones(N)
    matrices.recv_tokens_WNN[:, 3] /= 2
    slow = []
    for num in range(2, 15):
        speeds_N = rank_speeds(Report.from_matrices(matrices.first(num)), speeds_N)
        assert (others(speeds_N, 3) == 1.0).all()
        slow += [num] if speeds_N[3] < 1.0 else []
    assert set(range(6, 9)) <= set(slow) and slow[-1] < 14, slow


def test_an_old_finding_counts_no_longer():
    fault = PlantedFault("column", rank=3, factor=4.0, cause="comm", windows=(0, 9))
    assert rank_speeds(report(fault, num_windows=60)).tolist() == [1.0] * N


def test_silent_ranks_and_windows_without_calls_are_no_trouble():
    found = report(PlantedFault("column", rank=3, factor=4.0, cause="comm"))
    matrices = found.matrices
    for values in (matrices.combine_us_WNN, matrices.dispatch_us_WNN, matrices.recv_tokens_WNN, matrices.compute_us_WN):
        values[-7:, 6] = np.nan
    speeds_N = rank_speeds(Report.from_matrices(matrices))
    assert np.isfinite(speeds_N).all() and speeds_N[6] == 1.0


def test_speeds_of_another_job_are_refused():
    with pytest.raises(ValueError, match=r"before_N has shape \(4,\), expected \(8,\)"):
        rank_speeds(report(), np.ones(4))


def test_a_rank_that_is_paused_outside_its_experts_is_slower_too():
    """Of the 400 us of a call the others are busy for 20, and it for 220."""
    records = records_of(
        generate(SyntheticJob(num_ranks=N, num_windows=8, faults=(PlantedFault("column", rank=3, factor=4.0),)))
    )
    call_us = 400.0
    length_s = records[0].num_calls * call_us * 1e-6
    records = [
        replace(r, t_end=r.t_start + length_s, blocked_us=r.num_calls * (call_us - (220 if r.rank == 3 else 20)))
        for r in records
    ]
    found = Report.of_records(records)
    assert [(f.kind, f.rank, f.cause) for f in found.findings] == [("column", 3, "comp")]
    speeds_N = rank_speeds(found)
    assert speeds_N[3] == pytest.approx(1 / found.findings[0].ratio), "220 us to 20 alone would say 0.2"
    assert (others(speeds_N, 3) == 1.0).all()
    relieved = records_of(generate(SyntheticJob(num_ranks=N, num_windows=8)))
    mild = [
        replace(r, t_end=r.t_start + length_s, blocked_us=r.num_calls * (call_us - (30 if r.rank == 3 else 20)))
        for r in relieved
    ]
    before_N = np.where(np.arange(N) == 3, 0.5, 1.0)
    assert rank_speeds(Report.of_records(mild), before_N)[3] == pytest.approx(2 / 3, rel=0.01)


def test_a_weight_is_never_further_from_1_than_the_findings_ratio_and_recovers_with_it():
    """A throttled rank: its time per token has spikes that its columns do not have."""
    records = synthetic_records(N, 8, faults=[late(3, 2.0)])
    slow = [replace(r, compute_us=r.compute_us * 10) if r.rank == 3 else r for r in records]
    found = Report.of_records(slow)
    (finding,) = found.findings
    speeds_N = rank_speeds(found, np.where(np.arange(N) == 3, 0.2, 1.0))
    assert speeds_N[3] == pytest.approx(1 / finding.ratio) and finding.ratio < 3
    later = Report.of_records(
        [replace(r, compute_us=r.compute_us * 4) if r.rank == 3 else r for r in synthetic_records(N, 8)]
    )
    assert not later.findings
    kept_N = rank_speeds(later, speeds_N)
    assert kept_N[3] == pytest.approx(speeds_N[3]), "without a finding it falls no further"
    assert rank_speeds(Report.of_records(synthetic_records(N, 8)), kept_N)[3] == 1.0
