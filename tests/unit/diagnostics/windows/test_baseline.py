"""What was usual in a run: a small file, that comes back as it was and refuses what it is not."""

import numpy as np
import pytest
from eprt.diagnostics.windows.baseline import MOST_WINDOWS, Baseline

from tests.unit.diagnostics.cases import late, matrices_of, synthetic_records


def test_a_baseline_comes_back_from_its_file(tmp_path):
    matrices = matrices_of(synthetic_records(num_windows=20))
    baseline = Baseline.from_matrices(matrices)
    baseline.save(tmp_path / "usual.npz")
    again = Baseline.load(tmp_path / "usual.npz")
    assert again.wait_us_WNN.shape == (MOST_WINDOWS, 4, 4)
    np.testing.assert_array_equal(again.wait_us_WNN, baseline.wait_us_WNN)
    np.testing.assert_allclose(np.median(again.wait_us_WNN), np.median(matrices.wait_us_WNN), rtol=0.1)


def test_a_single_bad_window_leaves_no_trace():
    matrices = matrices_of(synthetic_records(num_windows=24, faults=[late(1, 30.0, windows=(5, 5))]))
    calm = matrices_of(synthetic_records(num_windows=24))
    np.testing.assert_allclose(
        Baseline.from_matrices(matrices).wait_us_WNN[1], Baseline.from_matrices(calm).wait_us_WNN[1], rtol=0.7
    )


@pytest.mark.parametrize("content", [b"", b"{}", b"PK\x03\x04 and no more"])
def test_what_is_no_baseline_is_refused_with_the_remedy(tmp_path, content):
    path = tmp_path / "usual.npz"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"is not a baseline .*--save-baseline FILE"):
        Baseline.load(path)


def test_another_npz_is_refused(tmp_path):
    np.savez(tmp_path / "load.npz", load=np.zeros(3))
    with pytest.raises(ValueError, match="is not a baseline"):
        Baseline.load(tmp_path / "load.npz")


def test_a_baseline_of_another_job_does_not_fit():
    baseline = Baseline.from_matrices(matrices_of(synthetic_records(4)))
    baseline.check_fits([0, 0, 0, 0])
    with pytest.raises(ValueError, match="of 4 ranks, the log of 8"):
        baseline.check_fits([0] * 8)
    with pytest.raises(ValueError, match="rank 2 is on node 1 in the log, and on node 0 in the baseline"):
        baseline.check_fits([0, 0, 1, 1])


@pytest.mark.parametrize(
    ("name", "change", "why"),
    [
        ("dispatch_us_WNN", lambda values: values[:, :3, :3], r"dispatch_us_WNN is float32\[6, 3, 3\]"),
        ("combine_us_WNN", lambda values: values[:2], r"combine_us_WNN is float32\[2, 4, 4\]"),
        ("compute_us_WN", lambda values: np.array(["a"]), "compute_us_WN is <U1"),
        ("combine_us_WNN", lambda values: values - 1e6, "combine_us_WNN has values below 0"),
        ("dispatch_us_WNN", lambda values: values * np.nan, "it has no wait of any rank"),
    ],
)
def test_arrays_that_nothing_can_be_compared_with_are_named(tmp_path, name, change, why):
    path = tmp_path / "usual.npz"
    Baseline.from_matrices(matrices_of(synthetic_records())).save(path)
    arrays = dict(np.load(path))
    np.savez(path, **arrays | {name: change(arrays[name])})
    with pytest.raises(ValueError, match=f"is not a baseline .*{why}"):
        Baseline.load(path)
