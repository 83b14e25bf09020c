"""The drift of bench_balance: its lower bound of moves, and the columns of every policy."""

import numpy as np
import pytest

from benchmarks.balancing.drift import bench_drift, slots_needed
from benchmarks.tools.report import BenchmarkReport

OPTIONS = {"num_slots": 8, "num_gpus": 4, "num_nodes": 2, "num_groups": 1}


def test_nothing_must_move_while_the_load_stays():
    load_LE = np.random.default_rng(0).lognormal(size=(3, 6))
    assert slots_needed(load_LE, load_LE, OPTIONS) == 0


def test_a_new_hot_expert_must_move_somewhere():
    after_LE = np.array([[6.0, 6, 1, 1, 1, 1, 1, 1]])
    assert slots_needed(np.ones((1, 8)), after_LE, {**OPTIONS, "num_nodes": 1}) >= 1


def test_every_policy_has_a_row_and_standing_still_moves_nothing():
    load_WLE = np.random.default_rng(1).lognormal(size=(4, 2, 6))
    report = BenchmarkReport("test", {})
    bench_drift(report, "random", load_WLE, OPTIONS, expert_bytes=1 << 20)
    rows = {row["policy"]: row for row in report.rows}
    assert {"static", "eplb", "scratch", "scratch, aligned", "incremental 1", "least"} <= set(rows)
    assert rows["static"]["slots_moved_share"] == 0 and rows["static"]["fewer_bytes_than_eplb"] == ""
    assert rows["eplb"]["fewer_bytes_than_eplb"] == pytest.approx(1)
    assert rows["scratch, aligned"]["slots_moved_share"] <= rows["scratch"]["slots_moved_share"]
    for row in report.rows[:-1]:
        assert 0 < row["mean_over_max_worst"] <= row["mean_over_max"] <= 1 <= row["skew_next"]
