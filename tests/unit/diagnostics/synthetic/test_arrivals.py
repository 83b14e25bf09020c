"""Played arrivals: waits follow from who comes late, and a fault's delay lengthens its place by its factor."""

import numpy as np
import pytest
from eprt.diagnostics.synthetic import PlantedFault, SyntheticJob, generate

from tests.unit.diagnostics.cases import late, link

N = 6


def mean_us(*faults: PlantedFault, **changes) -> np.ndarray:
    return generate(SyntheticJob(N, 30, 1, "arrivals", faults=faults, **changes)).wait_us_WNN.mean(axis=0)


def test_a_late_rank_is_awaited_by_all_and_waits_for_nobody():
    clean_NN, late_NN = mean_us(), mean_us(late(2, 3.0))
    others = [0, 1, 3, 4, 5]
    assert late_NN[others, 2].mean() / clean_NN[others, 2].mean() == pytest.approx(3.0, rel=0.1)
    assert late_NN[2, others].mean() < 0.7 * clean_NN[2, others].mean()


def test_a_slow_link_echoes_in_its_receivers_column():
    clean_NN, slow_NN = mean_us(), mean_us(link(1, 4, 4.0))
    assert slow_NN[1, 4] / clean_NN[1, 4] == pytest.approx(4.0, rel=0.1)
    others = [0, 2, 3, 4, 5]
    assert slow_NN[others, 1].mean() > 1.3 * clean_NN[others, 1].mean(), "it is late to the others"
    assert slow_NN[0, 3] < 1.3 * clean_NN[0, 3]


def test_who_is_slow_to_send_is_blocked_as_long_as_the_others_and_who_is_late_is_not():
    def blocked_over_others(fault: PlantedFault) -> float:
        blocked_us_N = generate(SyntheticJob(N, 30, 1, "arrivals", faults=(fault,))).blocked_us_WN.mean(axis=0)
        return blocked_us_N[2] / np.median(np.delete(blocked_us_N, 2))

    assert blocked_over_others(late(2, 4.0)) < 0.5
    assert blocked_over_others(PlantedFault("column", rank=2, cause="comm", factor=4.0)) > 0.8


def test_more_tokens_go_where_load_is_the_cause():
    crowded = PlantedFault("column", rank=2, cause="mixed", factor=3.0, windows=(10, 29))
    tokens_WN = generate(SyntheticJob(N, 30, 1, "arrivals", faults=(crowded,))).recv_tokens_WNN.sum(axis=2)
    assert (tokens_WN[10:, 2] == 3 * tokens_WN[10:, 0]).all() and (tokens_WN[:10, 2] == tokens_WN[:10, 0]).all()


def test_idle_ranks_come_early_and_send_nothing():
    matrices = generate(SyntheticJob(N, 30, 1, "arrivals", idle=(2,), batch_skew=0.3))
    assert not matrices.recv_tokens_WNN[:, :, 2].any() and matrices.recv_tokens_WNN[:, :, 0].all()
    assert matrices.dispatch_us_WNN[:, 2].mean() > 1.5 * matrices.dispatch_us_WNN[:, 0].mean()


def test_links_between_nodes_take_longer():
    waits_NN = mean_us(ranks_per_node=3)
    assert waits_NN[:3, 3:].mean() > 1.5 * waits_NN[:3, :3][~np.eye(3, dtype=bool)].mean()
