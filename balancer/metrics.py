"""How good a plan is, as plain JSON values for Placement.metrics.

Knows GPU times under slot weights, not how a plan was found.
"""

from typing import Any

import numpy as np

from .placement import Placement
from .problem import PlacementProblem


def gpu_time(
    placement: Placement, load_LE: np.ndarray, speed_G: np.ndarray, weight_LP: np.ndarray | None = None
) -> np.ndarray:
    """float64 [L, G]: load over speed, 0 for masked GPUs. weight_LP: slot weights, default the placement's own."""
    load_LG = placement.gpu_load(load_LE, weight_LP)
    return np.divide(load_LG, speed_G, out=np.zeros_like(load_LG), where=speed_G > 0)


def max_over_mean(time_LG: np.ndarray, speed_G: np.ndarray) -> np.ndarray:
    """float64 [L]: the busiest GPU's time over the time of a perfect split (1.0: even); 1 for a layer without load."""
    mean_L = time_LG @ speed_G / speed_G.sum()
    return np.divide(time_LG.max(1), mean_L, out=np.ones_like(mean_L), where=mean_L > 0)


def plan_metrics(problem: PlacementProblem, placement: Placement, bound_L: np.ndarray | None = None) -> dict[str, Any]:
    """max_over_mean under the placement's slot weights (even: under even weights), averaged over layers.

    bound_L: float64 [L], lower bound of the largest GPU time of any even split under the policy. Adds max_over_bound;
    uneven weights may reach less than 1.
    """
    speed_G = problem.speed_G
    time_LG = gpu_time(placement, problem.load_LE, speed_G)
    even_LG = gpu_time(placement, problem.load_LE, speed_G, placement.even_weight_LP)
    skew_L = max_over_mean(time_LG, speed_G)
    worst = int(skew_L.argmax())
    metrics = {
        "policy": problem.policy,
        "max_over_mean": float(skew_L.mean()),
        "max_over_mean_worst_layer": float(skew_L[worst]),
        "worst_layer": worst,
        "max_over_mean_even": float(max_over_mean(even_LG, speed_G).mean()),
    }
    if bound_L is not None:
        for name, largest_L in (("max_over_bound", time_LG.max(1)), ("max_over_bound_even", even_LG.max(1))):
            ratio_L = np.divide(largest_L, bound_L, out=np.ones_like(bound_L), where=bound_L > 0)
            metrics[name] = float(ratio_L.mean())
    return metrics
