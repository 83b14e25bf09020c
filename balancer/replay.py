"""Replay: runs policies over recorded load. Each plans from past windows and is judged on the next one.

    replays = [replay(name, policy, load_WLE, start) for name, policy in policies(...).items()]

Knows neither files nor tables (commands/replay.py).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from .affinity import traffic_per_token
from .eplb import rebalance_experts
from .moves import aligned, moved_slots
from .placement import Placement
from .plan import plan
from .trace import RoutingTrace


@dataclass(frozen=True, eq=False)
class PolicyInput:
    """What a policy plans from."""

    load_LE: np.ndarray  # float64 [L, E], of the latest windows
    placement: Placement  # in force
    is_first: bool  # nothing has been planned before
    trace: RoutingTrace | None  # sampled tokens, if there are any


Policy = Callable[[PolicyInput], Placement]


class TraceSplit:
    """Splits a trace into tokens to plan with and tokens to count traffic on, which are never the same.

    If the trace knows the windows of its tokens, a plan uses those before the judged window. Otherwise a plan uses
    every other token of all windows.
    """

    def __init__(self, trace: RoutingTrace):
        self._trace = trace
        self._halves = None if trace.window is not None else halves(trace)

    def tokens_before(self, window: int) -> RoutingTrace:
        """The tokens that a plan for this window may use."""
        return self._halves[0] if self._halves else self._trace.in_windows(-1, window)

    def judged_tokens(self, window: int) -> RoutingTrace:
        """The tokens that the traffic of this window is counted on."""
        return self._halves[1] if self._halves else self._trace.in_windows(window, window + 1)


@dataclass(frozen=True, eq=False)
class Replay:
    """The results of one policy in windows 1 .. W - 1 (V of them); window 0 is only planned from."""

    name: str
    load_VLG: np.ndarray  # float64: tokens of each GPU
    moves_V: np.ndarray  # int64: slots whose GPU had to receive an expert; first the change from the start
    # float64: crossings per token, mean over layers; a window without sampled tokens repeats the previous value. None:
    # no trace.
    traffic_V: np.ndarray | None

    @property
    def max_over_mean_V(self) -> np.ndarray:
        """The busiest GPU's load over the mean, averaged over layers with load."""
        return np.array([_over_layers(load_LG, lambda max_L, mean_L: max_L / mean_L) for load_LG in self.load_VLG])

    @property
    def balance_ratio_V(self) -> np.ndarray:
        """Mean over max, averaged over layers with load: the share of the time in which the average GPU is busy."""
        return np.array([_over_layers(load_LG, lambda max_L, mean_L: mean_L / max_L) for load_LG in self.load_VLG])

    @property
    def later_moves(self) -> int:
        """All moves but the first plan's."""
        return int(self.moves_V[1:].sum())


def replay(
    name: str,
    policy: Policy,
    load_WLE: np.ndarray,
    start: Placement,
    *,
    memory: int = 1,
    every: int = 1,
    tokens: TraceSplit | None = None,
    objective: str = "node_copies",
) -> Replay:
    """Runs one policy. ValueError if there is only one window.

    load_WLE: [W, L, E].
    start: the placement in force before the first plan.
    memory: how many of the latest windows a plan is made from.
    every: number of windows from plan to plan.
    objective: the traffic that traffic_V counts, see affinity.py.
    """
    if len(load_WLE) < 2:
        raise ValueError(f"{len(load_WLE)} window: a replay needs two or more, to plan from and to be judged on")
    placement, loads, moves, crossings = start, [], [], []
    for window in range(1, len(load_WLE)):
        before = placement
        if (window - 1) % every == 0:
            seen_LE = load_WLE[max(0, window - memory) : window].sum(0)
            trace = None if tokens is None else tokens.tokens_before(window)
            placement = policy(PolicyInput(seen_LE, before, window == 1, trace))
        moves.append(int(moved_slots(before, placement).sum()))
        loads.append(placement.gpu_load(load_WLE[window]))
        if tokens is not None:
            judged = tokens.judged_tokens(window)
            if judged.num_tokens or not crossings:
                crossings.append(float(traffic_per_token(placement, judged, objective).mean()))
            else:
                crossings.append(crossings[-1])
    return Replay(name, np.stack(loads), np.array(moves), np.array(crossings) if tokens else None)


def policies(
    cluster: dict[str, Any], goal: dict[str, Any] | None, max_moves_per_layer: int | None, names: list[str]
) -> dict[str, Policy]:
    """The policies of these names.

    cluster: keyword arguments of plan() that describe the cluster.
    goal: keyword arguments of plan() for less traffic, without coactivation; None: there is no trace.
    """

    def budget(seen: PolicyInput) -> dict[str, Any]:
        return {} if seen.is_first else {"current": seen.placement, "max_moves_per_layer": max_moves_per_layer}

    known: dict[str, Policy] = {
        "none": lambda seen: seen.placement,
        "eplb": lambda seen: eplb_placement(seen.load_LE, cluster),
        "scratch": lambda seen: plan(seen.load_LE, **cluster),
        "aligned": lambda seen: aligned(plan(seen.load_LE, **cluster), seen.placement),
        "incremental": lambda seen: plan(seen.load_LE, **cluster, **budget(seen)),
        "affinity": lambda seen: plan(seen.load_LE, **cluster, **(goal or {}), **budget(seen), coactivation=seen.trace),
    }
    for name in names:
        if name not in known:
            raise ValueError(f"unknown policy {name!r}; known are {', '.join(known)}")
        if name == "affinity" and goal is None:
            raise ValueError("the policy affinity needs routing traces (topk_idx), which the file does not hold")
    return {name: known[name] for name in names}


def eplb_placement(load_LE: np.ndarray, cluster: dict[str, Any]) -> Placement:
    """The placement of DeepSeek's EPLB, which may put several copies of one expert on one GPU."""
    for name in ("gpu_speed", "usable_slots"):
        if name in cluster:
            raise ValueError(f"{name}: EPLB does not support it; leave out the policy eplb")
    shape = (cluster["num_slots"], cluster["num_groups"], cluster["num_nodes"], cluster["num_gpus"])
    slots_LP, _, _ = rebalance_experts(load_LE, *shape)
    return Placement(slots_LP, cluster["num_gpus"], cluster["num_nodes"])


def halves(trace: RoutingTrace) -> tuple[RoutingTrace, RoutingTrace]:
    """(tokens to plan with, tokens to count traffic on): a plan is never judged on the tokens it was made from."""
    return trace.every_other(0), trace.every_other(1)


def _over_layers(load_LG: np.ndarray, ratio: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> float:
    """Mean of ratio(max, mean) over the layers with load; 1 if there are none."""
    used_LG = load_LG[load_LG.sum(1) > 0]
    return float(ratio(used_LG.max(1), used_LG.mean(1)).mean()) if len(used_LG) else 1.0
