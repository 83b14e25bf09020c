"""Replays recorded load window by window: each policy plans from what it has seen, and is judged on the window after.

replays = [replay(name, policy, load_WLE, start) for name, policy in policies(...).items()]
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
class Seen:
    """What a policy plans from. load_LE: float64 [L, E], of the latest windows. placement: in force. is_first: nothing
    has been planned before. trace: tokens to look at, None without any."""

    load_LE: np.ndarray
    placement: Placement
    is_first: bool
    trace: RoutingTrace | None


Policy = Callable[[Seen], Placement]


class Tokens:
    """Which tokens of a trace a replay may plan with, and on which it counts traffic: never on those it has seen.

    Where the trace knows the windows of its tokens: those of the windows before, and of the window judged. Otherwise
    every other token, in all windows alike, and the rest.
    """

    def __init__(self, trace: RoutingTrace):
        self._trace = trace
        self._halves = None if trace.window is not None else halves(trace)

    def seen(self, window: int) -> RoutingTrace:
        """Before this window begins."""
        return self._halves[0] if self._halves else self._trace.of_windows(-1, window)

    def judged(self, window: int) -> RoutingTrace:
        return self._halves[1] if self._halves else self._trace.of_windows(window, window + 1)


@dataclass(frozen=True, eq=False)
class Replay:
    """One policy over windows 1 .. W - 1 (V of them); window 0 is only planned from.

    load_VLG: float64, tokens of each GPU. moves_V: int64, slots whose GPU had to receive an expert; the first entry is
    the change from the placement before. traffic_V: crossings per token, mean over layers (those of the window before
    where no token of a window was sampled); None without a trace.
    """

    name: str
    load_VLG: np.ndarray
    moves_V: np.ndarray
    traffic_V: np.ndarray | None
    placement: Placement

    @property
    def max_over_mean_V(self) -> np.ndarray:
        """Mean over layers with load."""
        return np.array([_skew(load_LG) for load_LG in self.load_VLG])

    @property
    def balance_ratio_V(self) -> np.ndarray:
        """Mean over max, mean over layers: 1.0 is even, the share of the time in which the average GPU has work."""
        return np.array([_ratio(load_LG) for load_LG in self.load_VLG])

    @property
    def later_moves(self) -> int:
        """Without the first plan's."""
        return int(self.moves_V[1:].sum())


def replay(
    name: str,
    policy: Policy,
    load_WLE: np.ndarray,
    start: Placement,
    *,
    memory: int = 1,
    every: int = 1,
    tokens: Tokens | None = None,
    objective: str = "node_copies",
) -> Replay:
    """load_WLE: [W, L, E]. start: the placement in force before. memory: windows that a plan is made from, the latest.
    every: windows from plan to plan. objective: what traffic_V counts, see affinity.py. ValueError with one window."""
    if len(load_WLE) < 2:
        raise ValueError(
            f"{len(load_WLE)} window: a replay needs two or more, one to plan from and one to be judged on"
        )
    placement, loads, moves, crossings = start, [], [], []
    for window in range(1, len(load_WLE)):
        before = placement
        if (window - 1) % every == 0:
            seen_LE = load_WLE[max(0, window - memory) : window].sum(0)
            trace = None if tokens is None else tokens.seen(window)
            placement = policy(Seen(seen_LE, before, window == 1, trace))
        moves.append(int(moved_slots(before, placement).sum()))
        loads.append(placement.gpu_load(load_WLE[window]))
        if tokens is not None:
            judged = tokens.judged(window)
            missing = not judged.num_tokens and crossings
            crossings.append(crossings[-1] if missing else _traffic(placement, judged, objective))
    return Replay(name, np.stack(loads), np.array(moves), np.array(crossings) if tokens else None, placement)


def _traffic(placement: Placement, judged: RoutingTrace, objective: str) -> float:
    return float(traffic_per_token(placement, judged, objective).mean())


def policies(
    chosen: dict[str, Any], goal: dict[str, Any] | None, max_moves_per_layer: int | None, names: list[str]
) -> dict[str, Policy]:
    """The named ones. chosen: plan()'s keyword arguments for the cluster; goal: for traffic, coactivation left out."""

    def budget(seen: Seen) -> dict[str, Any]:
        return {} if seen.is_first else {"current": seen.placement, "max_moves_per_layer": max_moves_per_layer}

    known: dict[str, Policy] = {
        "none": lambda seen: seen.placement,
        "eplb": lambda seen: eplb_placement(seen.load_LE, chosen),
        "scratch": lambda seen: plan(seen.load_LE, **chosen),
        "aligned": lambda seen: aligned(plan(seen.load_LE, **chosen), seen.placement),
        "incremental": lambda seen: plan(seen.load_LE, **chosen, **budget(seen)),
        "affinity": lambda seen: plan(seen.load_LE, **chosen, **(goal or {}), **budget(seen), coactivation=seen.trace),
    }
    for name in names:
        if name not in known:
            raise ValueError(f"no policy {name!r}; there are {', '.join(known)}")
        if name == "affinity" and goal is None:
            raise ValueError("the policy affinity needs routing traces (topk_idx), which the file does not hold")
    return {name: known[name] for name in names}


def eplb_placement(load_LE: np.ndarray, chosen: dict[str, Any]) -> Placement:
    """What DeepSeek's EPLB would place: possibly several copies of one expert on one GPU."""
    for name in ("gpu_speed", "usable_slots"):
        if name in chosen:
            raise ValueError(f"{name}: EPLB knows nothing of it; leave the policy eplb out")
    shape = (chosen["num_slots"], chosen["num_groups"], chosen["num_nodes"], chosen["num_gpus"])
    slots_LP, _, _ = rebalance_experts(load_LE, *shape)
    return Placement(slots_LP, chosen["num_gpus"], chosen["num_nodes"])


def halves(trace: RoutingTrace) -> tuple[RoutingTrace, RoutingTrace]:
    """Every other token to plan with, the rest to count on: a plan is never judged on the tokens it has seen."""
    return trace.every_other(0), trace.every_other(1)


def _skew(load_LG: np.ndarray) -> float:
    used = load_LG.sum(1) > 0
    return float((load_LG[used].max(1) / load_LG[used].mean(1)).mean()) if used.any() else 1.0


def _ratio(load_LG: np.ndarray) -> float:
    used = load_LG.sum(1) > 0
    return float((load_LG[used].mean(1) / load_LG[used].max(1)).mean()) if used.any() else 1.0
