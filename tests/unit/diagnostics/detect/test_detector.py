"""What stands out: among 1 to 256 ranks, in one window and in many; since when, until when, and what is too little."""

import numpy as np
import pytest
from eprt.diagnostics.detect.analysis import find_faults
from eprt.diagnostics.detect.detector import MIN_POINT_RATIO, MIN_RANK_RATIO, detect
from eprt.diagnostics.synthetic import PlantedFault, SyntheticJob, generate

from tests.unit.diagnostics.cases import late, link, places


def found(job: SyntheticJob):
    return find_faults(generate(job))[1]


def test_outliers_tell_how_far_each_place_is_from_the_usual():
    job = SyntheticJob(16, 6, 1, cv=0.05, faults=(late(3, 3.0, windows=(2, 5)), link(8, 11, 6.0)))
    outliers, _ = detect(generate(job))
    assert (outliers.column_z_WN[2:, 3] > 15).all() and abs(outliers.column_z_WN[:2, 3]).max() < 4
    np.testing.assert_allclose(outliers.column_ratio_WN[2:, 3], 3.0, rtol=0.15)
    np.testing.assert_allclose(outliers.row_ratio_WN[2:, 3], 1 / 3, rtol=0.3)
    np.testing.assert_allclose(outliers.point_ratio_WNN[:, 8, 11], 6.0, rtol=0.2)
    others = np.delete(outliers.column_ratio_WN, 3, axis=1)
    np.testing.assert_allclose(others, 1.0, atol=0.2)
    assert np.isnan(outliers.point_z_WNN[:, np.arange(16), np.arange(16)]).all()


@pytest.mark.parametrize(("factor", "is_told"), [(MIN_RANK_RATIO - 0.2, False), (MIN_RANK_RATIO + 0.2, True)])
def test_a_rank_that_is_a_little_slow_is_sure_and_yet_not_worth_a_word(factor, is_told):
    job = SyntheticJob(16, 12, 1, cv=0.05, faults=(PlantedFault("column", rank=3, factor=factor),))
    outliers, sightings = detect(generate(job))
    assert (outliers.column_z_WN[:, 3] > 3.5).all() and [s.place.rank for s in sightings] == [3] * is_told


@pytest.mark.parametrize(
    ("windows", "factor", "is_told"), [((2, 3), 2.0, False), ((2, 3), 2.6, True), ((0, 11), 2.0, True)]
)
def test_a_link_must_be_slower_the_shorter_it_is_seen(windows, factor, is_told):
    assert MIN_POINT_RATIO + 1 / 12 < 2.0 < MIN_POINT_RATIO + 1 / 2 < 2.6
    _, sightings = detect(generate(SyntheticJob(16, 12, 1, cv=0.05, faults=(link(3, 8, factor, windows),))))
    assert [(s.place.src, s.place.dst) for s in sightings] == [(3, 8)] * is_told


# ---- numbers of ranks and windows -----------------------------------------------------------------------------------


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 7, 8, 16, 32])
def test_a_clean_job_has_no_finding(num_ranks):
    for seed in range(10):
        assert found(SyntheticJob(num_ranks, 6, seed)) == []
    assert found(SyntheticJob(num_ranks, 6, 99, ranks_per_node=4)) == [], "slower links between nodes are no fault"


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


@pytest.mark.parametrize("num_ranks", [4, 5, 8, 13, 48, 128, 256])
def test_places_are_named_from_four_ranks_to_256(num_ranks):
    column = PlantedFault("column", rank=num_ranks - 1, factor=3.0, cause="comp", windows=(2, 5))
    point = PlantedFault("point", src=0, dst=2, factor=6.0, windows=(2, 5))
    for fault in (column, point) if num_ranks > 4 else (column,):
        (finding,) = find_faults(generate(SyntheticJob(num_ranks, 6, seed=num_ranks, faults=(fault,))))[1]
        assert (finding.kind, finding.rank, finding.src, finding.dst) == (fault.kind, fault.rank, fault.src, fault.dst)
        assert finding.cause == fault.cause and (finding.first_window, finding.last_window) == (2, 5)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_few_ranks_name_only_the_one_all_wait_for(num_ranks):
    (finding,) = found(SyntheticJob(num_ranks, 6, faults=(late(1, 4.0),)))
    assert (finding.kind, finding.rank) == ("column", 1)
    matrices = generate(SyntheticJob(num_ranks, 6, faults=(late(1, 4.0),)))
    for waits_us_WNN in (matrices.dispatch_us_WNN, matrices.combine_us_WNN):
        waits_us_WNN /= 100  # a few microseconds are not worth a word
    assert find_faults(matrices)[1] == []


def test_a_slow_link_of_three_ranks_is_not_named():
    """Nobody could tell it from a slow rank."""
    assert found(SyntheticJob(3, 6, faults=(link(0, 2, 6.0),))) == []


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


def test_a_passing_fault_is_dated():
    (finding,) = found(SyntheticJob(8, 12, faults=(late(1, 4.0, windows=(4, 7)),)))
    assert (finding.kind, finding.rank) == ("column", 1)
    assert (finding.first_window, finding.last_window) == (4, 7) and "4 of 12 windows" in finding.evidence


def test_bursts_in_every_third_window_are_told_one_by_one():
    findings = found(SyntheticJob(8, 12, faults=tuple(late(3, 8.0, windows=(w, w)) for w in range(2, 12, 3))))
    assert {(f.kind, f.rank, f.cause) for f in findings} == {("column", 3, "comp")}
    assert sorted((f.first_window, f.last_window) for f in findings) == [(2, 2), (5, 5), (8, 8), (11, 11)]


def test_faults_one_after_the_other():
    findings = found(SyntheticJob(8, 20, 2, faults=(late(1, windows=(2, 7)), late(6, windows=(12, 17)))))
    assert {f.rank: (f.first_window, f.last_window) for f in findings} == {1: (2, 7), 6: (12, 17)}


def test_a_fault_that_comes_back_is_told_twice():
    findings = found(SyntheticJob(8, 24, 2, faults=(late(1, windows=(2, 6)), late(1, windows=(15, 20)))))
    assert sorted((f.rank, f.first_window, f.last_window) for f in findings) == [(1, 2, 6), (1, 15, 20)]
