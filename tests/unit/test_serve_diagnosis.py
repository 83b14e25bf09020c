"""Windows from the ranks' running totals: findings, the log, and windows that say nothing."""

import pytest
from eprt.diagnostics import read_log

from eprt.serve.diagnosis import Diagnosis
from eprt.serve.messages import WaitTotals

N = 6


def totals(window: int, slow: int | None = None) -> dict[int, WaitTotals]:
    """After `window` windows of 100 calls; everybody waits 5 us per call for each, 60 us for the slow rank."""
    waits = [float(window * 100 * (60 if j == slow else 5)) for j in range(N)]
    return {
        i: WaitTotals(window * 100, [0.0 if i in (j, slow) else waits[j] + i + j for j in range(N)], [1.0] * N, [0] * N,
                      [0] * N, 1000.0 * window)
        for i in range(N)
    }  # fmt: skip


def test_slow_rank_is_found_and_logged(tmp_path):
    diagnosis = Diagnosis(N, str(tmp_path))
    assert diagnosis.findings() == {"schema": "eprt.findings/1", "num_ranks": N, "windows": 0, "findings": []}
    for window in range(5):
        diagnosis.close_window(totals(window, slow=3), node_of_rank=(0,) * N)
    found = diagnosis.findings()
    assert found["windows"] == 4
    assert [(f["kind"], f["rank"]) for f in found["findings"] if f["kind"] == "column"] == [("column", 3)]
    records = read_log(tmp_path).records
    assert len(records) == 4 * N and {r.num_calls for r in records} == {100}
    assert records[0].dispatch_wait_us[3] == pytest.approx(6000, abs=1)


def test_windows_without_calls_are_dropped():
    diagnosis = Diagnosis(N)
    for _ in range(3):
        diagnosis.close_window(totals(1), node_of_rank=(0,) * N)
    assert diagnosis.findings()["windows"] == 0
