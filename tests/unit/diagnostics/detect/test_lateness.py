"""Lateness: a late rank adds the same time to short links and long ones; late messages, and inherited lateness."""

import numpy as np
import pytest
from eprt.diagnostics.detect.lateness import Lateness, LinkLateness, spared_us
from eprt.diagnostics.detect.runs import WindowRun
from eprt.diagnostics.detect.topology import LinkTopology

N, ONSET, LATE = 6, 4, 2
NODE_N = np.arange(N) // 3
USUAL_NN = np.where(NODE_N[:, None] == NODE_N, 30.0, 100.0)


def waits(**changes: float) -> np.ndarray:
    """12 windows of two nodes. changes: "column" and "row" of rank LATE, in microseconds from ONSET on."""
    noise_WNN = 0.5 * np.random.default_rng(1).standard_normal((12, N, N))
    wait_us_WNN = USUAL_NN + noise_WNN
    wait_us_WNN[ONSET:, :, LATE] += changes.get("column", 0.0)
    wait_us_WNN[ONSET:, LATE] += changes.get("row", 0.0)
    wait_us_WNN[:, np.arange(N), np.arange(N)] = np.nan
    return wait_us_WNN


def lateness(wait_us_WNN: np.ndarray) -> Lateness:
    return Lateness.from_waits(0.5 * wait_us_WNN, 0.5 * wait_us_WNN)


def change_of(values_WN: np.ndarray) -> np.ndarray:
    return np.median(values_WN[ONSET:], axis=0) - np.median(values_WN[:ONSET], axis=0)


def test_a_column_is_late_by_as_much_on_short_links_and_long_ones():
    change_N = change_of(lateness(waits(column=20)).column_us_WN)
    assert change_N[LATE] == pytest.approx(20, abs=1)
    assert np.delete(change_N, LATE) == pytest.approx(0, abs=1)


def test_messages_are_late_where_the_rank_is_not_early_at_the_other_end():
    late = lateness(waits(column=20))
    assert change_of(late.messages_us_WN)[LATE] == pytest.approx(20, abs=1)
    inherited = lateness(waits(column=20, row=-20))
    assert change_of(inherited.column_us_WN)[LATE] == pytest.approx(20, abs=1)
    assert change_of(inherited.row_us_WN)[LATE] == pytest.approx(-20, abs=1)
    assert change_of(inherited.messages_us_WN)[LATE] == pytest.approx(0, abs=1)


def test_what_single_messages_make_late_is_inherited():
    """In some windows one message to a rank is very late, and in the phase after that all wait as long for the rank."""
    rng = np.random.default_rng(2)
    dispatch_us_WNN, combine_us_WNN = 0.5 * waits(column=20), 0.5 * waits(column=20)
    calm = lateness(dispatch_us_WNN + combine_us_WNN)
    for w in range(12):
        for rank in (w % N, (w + 2) % N):
            late_us, sender = rng.uniform(60, 200), (rank + 1 + rng.integers(N - 1)) % N
            dispatch_us_WNN[w, rank, sender] += late_us
            combine_us_WNN[w, :, rank] += late_us
    tailed = Lateness.from_waits(dispatch_us_WNN, combine_us_WNN)
    assert tailed.column_us_WN.std() > 20 and calm.column_us_WN.std() < 10
    assert tailed.messages_us_WN.std() < 0.5 * tailed.column_us_WN.std()
    assert change_of(tailed.messages_us_WN)[LATE] == pytest.approx(20, abs=3)
    assert np.delete(change_of(tailed.messages_us_WN), LATE) == pytest.approx(0, abs=3)


def test_a_change_is_told_over_the_mean_wait_before_the_run():
    late = lateness(waits(column=36))
    run = WindowRun(LATE, ONSET, 11, 9.0)  # waits of 30, 30, 100, 100, 100: 72 in the mean
    assert late.ratio(late.awaited_us_WN, run, 36 / late.usual_us) == pytest.approx(1.5, rel=0.02)


def test_ranks_without_a_line_are_left_out():
    wait_us_WNN = waits(column=20)
    wait_us_WNN[5, 0] = np.nan
    wait_us_WNN[6] = np.nan
    late = lateness(wait_us_WNN)
    assert np.isnan(late.column_us_WN[6]).all() and np.isnan(late.awaited_us_WN[6]).all()
    assert np.nanmedian(late.column_us_WN[ONSET:, LATE]) - late.column_us_WN[:ONSET, LATE].mean() > 19


def test_a_rank_that_works_longer_is_spared_waiting():
    blocked_us_WN = np.full((3, 4), 200.0)
    blocked_us_WN[1:, 3] = 150.0
    assert spared_us(blocked_us_WN)[:, 3].tolist() == [0, 50, 50]
    assert spared_us(blocked_us_WN)[:, :3].tolist() == [[0, 0, 0]] * 3


def test_a_slow_link_of_two_small_nodes_is_what_is_left_of_both_ends():
    """Its receiver is late for all by as much, which is most of what its tier waits."""
    node_N, rng = np.arange(4) // 2, np.random.default_rng(0)
    tier_NN = LinkTopology.from_nodes(node_N).tier_NN
    waits_WNN = np.where(tier_NN == 1, 160.0, 50.0) + 8 * rng.standard_normal((12, 4, 4))
    waits_WNN[4:, 1, 3] += 320.0
    waits_WNN[4:, [0, 2, 3], 1] += 320.0
    pairs_P2 = np.argwhere(tier_NN >= 0)
    links = LinkLateness.from_waits(waits_WNN, tier_NN, pairs_P2)
    late_P = np.median(links.late_WP[4:], axis=0) - np.median(links.late_WP[:4], axis=0)
    slow = pairs_P2.tolist().index([1, 3])
    assert late_P.argmax() == slow and np.delete(late_P, slow).max() < 0.1 * late_P[slow]
    assert links.ratio(WindowRun(slow, 4, 11, 9.0), late_P[slow]) == pytest.approx(3.0, rel=0.15)
