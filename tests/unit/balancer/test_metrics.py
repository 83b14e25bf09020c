"""Metrics of a plan: times under slot weights, skew, and the distance from the bound."""

import numpy as np
import pytest
from eprt.balancer import Placement, plan
from eprt.balancer.metrics import gpu_time, max_over_mean

SLOTS_LP = np.array([[0, 1, 0, 2], [0, 1, 2, -1]])
LOAD_LE = np.array([[6.0, 1, 2], [4.0, 2, 0]])


def test_times_are_loads_over_speeds_and_0_on_masked_gpus():
    placement = Placement(SLOTS_LP, 2, slot_weight=np.array([[0.5, 1, 0.5, 1], [1, 1, 1, 0]]))
    np.testing.assert_allclose(gpu_time(placement, LOAD_LE, np.array([1.0, 2.0])), [[4, 2.5], [6, 0]])
    np.testing.assert_allclose(gpu_time(placement, LOAD_LE, np.array([1.0, 0.0])), [[4, 0], [6, 0]])
    weight_LP = np.array([[0, 1, 1, 1], [1, 1, 1, 0.0]])
    np.testing.assert_allclose(gpu_time(placement, LOAD_LE, np.ones(2), weight_LP), [[1, 8], [6, 0]])


def test_the_mean_is_a_perfect_split_by_speed():
    speed_G = np.array([1.0, 3.0])
    np.testing.assert_allclose(max_over_mean(np.array([[2.0, 2.0], [8.0, 0.0]]), speed_G), [1, 4])
    assert max_over_mean(np.zeros((1, 2)), speed_G).tolist() == [1], "a layer without load is even"


def test_a_plan_tells_its_worst_layer_and_how_far_it_is_from_the_bound():
    load_LE = np.array([[1.0, 1, 1, 1], [3.0, 1, 1, 1]])
    metrics = plan(load_LE, num_gpus=2).metrics
    assert metrics["policy"] == "global" and metrics["worst_layer"] == 1
    assert metrics["max_over_mean_worst_layer"] == pytest.approx(4 / 3)
    assert metrics["max_over_mean"] == metrics["max_over_mean_even"] == pytest.approx((1 + 4 / 3) / 2)
    assert metrics["max_over_bound"] >= metrics["max_over_bound_even"] * (1 - 1e-9) >= 1 - 1e-9
