"""What was usual before: windows that no younger finding covers, or all where findings leave too few."""

import numpy as np
import pytest
from eprt.diagnostics.windows.usual import UsualWaits, find_calm_windows

from tests.unit.diagnostics.cases import matrices_of, record


def matrices(*waits_us: float):
    """A window for each: every rank waits so long per call for every other one."""
    return matrices_of(
        [
            record(rank, window, dispatch_wait_us=[100 * wait_us] * 4, combine_wait_us=[0.0] * 4)
            for window, wait_us in enumerate(waits_us)
            for rank in range(4)
        ]
    )


def seen(first: int, last: int) -> dict:
    return {"first_window": first, "last_window": last}


@pytest.mark.parametrize(
    ("findings", "calm"),
    [
        ([], [1, 1, 1, 1, 1]),
        ([seen(3, 4)], [1, 1, 1, 0, 0]),
        ([seen(1, 1), seen(3, 3)], [1, 0, 1, 0, 1]),
        ([seen(0, 4)], [1, 1, 1, 1, 1]),  # as old as the run
        ([seen(0, 2), seen(4, 9)], [1, 1, 1, 1, 0]),
    ],
)
def test_younger_findings_cover_their_windows(findings, calm):
    assert find_calm_windows(matrices(1, 1, 1, 1, 1), findings).tolist() == list(map(bool, calm))


def test_a_slow_job_is_compared_with_its_past():
    """Everything is three times slower for most of the run: the median of all windows would call that usual."""
    usual = UsualWaits.from_past(matrices(50, 52, 150, 150, 150, 150), [seen(2, 5)])
    assert usual.source == "the median of the 2 of 6 windows that no finding covers"
    np.testing.assert_allclose(usual.planes_PNN[0], 51)
    np.testing.assert_allclose(usual.planes_PNN[2], 32)
    assert usual.compute_us_N.tolist() == [200] * 4 and usual.recv_tokens_N.tolist() == [4 * 32] * 4


def test_without_a_past_all_windows_are_it():
    usual = UsualWaits.from_past(matrices(50, 150, 150), [seen(1, 2)])
    assert usual.source == "the median of all 3 windows: findings cover them"
    np.testing.assert_allclose(usual.planes_PNN[0], 150)
    assert UsualWaits.from_past(matrices(50), []).source == "the median of 1 window"
