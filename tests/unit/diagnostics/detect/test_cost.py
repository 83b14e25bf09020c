"""What a fault costs: the latest rank's lateness beyond that of the next, as step time and tokens per second."""

from dataclasses import replace

import numpy as np
import pytest
from eprt.diagnostics.detect.cost import cost_of
from eprt.diagnostics.windows.matrices import WindowMatrices

from tests.unit.diagnostics.cases import matrices_of, record

N, W, CALLS = 4, 3, 100


def matrices(awaited_us: list[float], combine_us: float = 10.0, usage: bool = True) -> WindowMatrices:
    """Every rank waits so long for rank j per call in dispatch; 20 calls are a step of 40 ms with 5 tokens a rank."""
    records = [
        record(
            rank,
            window,
            dispatch_wait_us=[0.0 if j == rank else CALLS * us for j, us in enumerate(awaited_us)],
            combine_wait_us=[0.0 if j == rank else CALLS * combine_us for j in range(N)],
            usage={"steps": 5, "step_us": 5 * 40_000.0, "tokens": 25} if usage else None,
        )
        for window in range(W)
        for rank in range(N)
    ]
    return matrices_of(records)


def test_the_cost_is_what_the_next_latest_leaves_to_save():
    cost = cost_of(matrices([100, 600, 100, 200]), slice(0, W), 1)
    assert cost.us_per_call == pytest.approx(400)
    assert (cost.step_ms, cost.step_ms_without) == (40.0, pytest.approx(40 - 20 * 0.4))
    assert cost.lost == pytest.approx(0.2)
    assert (cost.tokens_per_s, cost.tokens_per_s_without) == (pytest.approx(500), pytest.approx(625))


def test_of_two_that_are_equally_late_neither_alone_costs_anything():
    cost = cost_of(matrices([100, 600, 600, 100]), slice(0, W), 1)
    assert (cost.us_per_call, cost.lost, cost.step_ms_without) == (0, 0, 40.0)


def test_a_rank_that_is_not_the_latest_costs_nothing():
    assert cost_of(matrices([100, 600, 100, 200]), slice(0, W), 3).lost == 0


def test_nothing_is_free():
    cost = cost_of(matrices([100, 60_000, 100, 100]), slice(0, W), 1)
    assert cost.lost == pytest.approx(0.98) and cost.step_ms_without is not None and cost.step_ms_without > 0


def test_without_usage_the_share_is_of_the_windows():
    cost = cost_of(matrices([100, 600, 100, 200], usage=False), slice(0, W), 1)
    assert (cost.us_per_call, cost.step_ms, cost.tokens_per_s) == (pytest.approx(400), None, None)
    assert cost.lost == pytest.approx(400 / 100_000, abs=1e-4), "10 s of 100 calls"


def test_gaps_and_two_ranks():
    some = matrices([100, 600, 100, 200])
    waits = some.dispatch_us_WNN.copy()
    waits[1] = np.nan
    assert cost_of(replace(some, dispatch_us_WNN=waits), slice(0, W), 1).us_per_call == pytest.approx(400)
    two = matrices_of([record(rank, 0, 2, dispatch_wait_us=[900.0 * rank, 5000.0 * (1 - rank)]) for rank in range(2)])
    assert cost_of(two, slice(0, 1), 1).us_per_call == pytest.approx(41)
