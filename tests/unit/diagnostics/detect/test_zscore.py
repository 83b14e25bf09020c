"""The plain z-score: an option that does what its name says, with the bound that makes it one to compare with only."""

import json

import numpy as np
import pytest
from eprt.diagnostics import analyse
from eprt.diagnostics.__main__ import main
from eprt.diagnostics.detect.analysis import find_faults
from eprt.diagnostics.mutes import with_mutes
from eprt.diagnostics.synthetic import SyntheticJob, generate

from tests.unit.diagnostics.cases import late, places, synthetic_records, write_records


def test_the_plain_z_score_is_an_option(tmp_path, capsys):
    """Five times, and more than ten ranks: what it takes for mean and deviation to show it."""
    write_records(tmp_path, synthetic_records(32, 6, seed=1, faults=[late(7, 8.0)]))
    report = analyse(tmp_path, method="zscore")
    assert ("column", 7) in places(report.findings)
    others = np.delete(report.outliers.column_z_WN, 7, axis=1)
    assert (report.outliers.column_z_WN[:, 7] > 3).all() and others.max() < 3
    assert main([str(tmp_path), "--json", "--method", "zscore"]) == 1
    told = with_mutes([finding.to_json() for finding in report.findings], [])
    assert json.loads(capsys.readouterr().out)["findings"] == told
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


@pytest.mark.parametrize("num_windows", [1, 4])
def test_one_rank_and_equal_waits_stand_out_nowhere(num_windows):
    assert find_faults(generate(SyntheticJob(1, num_windows)), "zscore")[1] == []
    matrices = generate(SyntheticJob(8, num_windows))
    matrices.dispatch_us_WNN[:] = matrices.combine_us_WNN[:] = 10.0
    assert find_faults(matrices, "zscore")[1] == []
