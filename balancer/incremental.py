"""From the placement in force to a better one within a budget of moves or bytes."""

import heapq
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from .affinity import OBJECTIVES, TrafficGoal, count_traffic
from .core import call
from .metrics import describe, gpu_time, max_over_mean
from .placement import EMPTY, Placement
from .problem import Problem

_DEFAULT_MOVES = 8
_FEW_SLOTS = 4  # as in csrc/balancer/incremental.cpp


def default_moves(num_gpus: int, slots_per_gpu: int) -> int:
    """Slots of each layer that one plan may change: 8; where a GPU has few, what one of them loses is much to it, and
    keeping up takes a third of the GPUs."""
    return max(_DEFAULT_MOVES, num_gpus // 3) if slots_per_gpu <= _FEW_SLOTS else _DEFAULT_MOVES


@dataclass(frozen=True)
class Budget:
    """max_moves_per_layer: slots that may receive an expert. max_bytes: over all layers, bytes_L each; None: no limit.
    min_gain: a move must lower the busiest GPU by this fraction of the mean, or traffic by so many crossings per
    token. Repairs are never held back."""

    max_moves_per_layer: int
    max_bytes: float | None
    bytes_L: np.ndarray | None
    min_gain: float

    @staticmethod
    def of(
        problem: Problem, current: Any, max_moves: Any, max_bytes: Any, bytes_per_expert: Any, min_gain: Any
    ) -> "Budget":
        """Arguments as in plan(); ValueError names the one that does not fit."""
        if current is None and (max_moves is not None or max_bytes is not None):
            raise ValueError("max_moves_per_layer and max_bytes limit what changes; they need current")
        if max_moves is None:
            few = default_moves(problem.num_gpus, problem.slots_per_gpu)
            max_moves = few if max_bytes is None else problem.num_slots
        if not isinstance(max_moves, int | np.integer) or max_moves < 0:
            raise ValueError(f"max_moves_per_layer={max_moves!r}: must be an integer of at least 0")
        if not 0 <= min_gain < np.inf:
            raise ValueError(f"min_gain={min_gain}: must be finite and at least 0")
        if max_bytes is not None and not max_bytes >= 0:
            raise ValueError(f"max_bytes={max_bytes}: must be at least 0")
        if max_bytes is not None and bytes_per_expert is None:
            raise ValueError("max_bytes needs bytes_per_expert: how many bytes one expert's weights have")
        bytes_L = None
        if bytes_per_expert is not None:
            bytes_L = np.array(np.broadcast_to(bytes_per_expert, (problem.num_layers,)), dtype=np.float64)
            if not (bytes_L > 0).all():
                layer = int(np.argmin(bytes_L > 0))
                raise ValueError(f"bytes_per_expert[layer {layer}] = {bytes_L[layer]}: must be above 0")
        return Budget(int(max_moves), max_bytes, bytes_L, float(min_gain))


REPAIR, BALANCE, TRAFFIC = range(3)  # enum Change::Kind of csrc/balancer/incremental.h


@dataclass(frozen=True)
class Step:
    """Changes of one layer that belong together. kind: REPAIR (not optional), BALANCE or TRAFFIC. gain: of its kind."""

    changes: tuple[tuple[int, int], ...]  # (slot, expert)
    gain: float
    kind: int

    @property
    def moves(self) -> int:
        return sum(expert != EMPTY for _, expert in self.changes)


def incremental(problem: Problem, current: Placement, budget: Budget, goal: TrafficGoal | None = None) -> Placement:
    """current with the most useful changes that the budget allows, in every layer. What balance leaves of the budget
    goes to the traffic goal; its allowance is over the balance that the budget would buy without it."""
    placement, taken = _within(problem, current, budget, goal)
    if goal is not None and budget.max_bytes is not None:
        # The native search keeps the allowance for whole steps; the limit on bytes may have cut balance's steps short.
        balanced, its_steps = _within(problem, current, budget, None)
        limit_L = _largest(problem, balanced) * (1 + goal.allowance)
        if (_largest(problem, placement) > limit_L * (1 + 1e-9)).any():
            placement, taken = balanced, its_steps
    before_LG = gpu_time(current, problem.load_LE, problem.speed_G, current.weight_LP)
    metrics = {
        **describe(problem, placement),
        "mode": "incremental",
        "max_over_mean_before": float(max_over_mean(before_LG, problem.speed_G).mean()),
        "moves": sum(step.moves for _, step in taken),
        "repairs": sum(step.moves for _, step in taken if step.kind == REPAIR),
    }
    if budget.bytes_L is not None:
        metrics["bytes"] = float(sum(step.moves * budget.bytes_L[layer] for layer, step in taken))
    if goal is not None:
        metrics |= {
            "traffic": goal.objective,
            "balance_allowance": goal.allowance,
            "choices_per_token": goal.tokens.topk_L[0].shape[1],
            "traffic_per_token_before": float(count_traffic(current, goal.tokens, goal.objective).mean()),
            "traffic_per_token": float(count_traffic(placement, goal.tokens, goal.objective).mean()),
            "moves_for_traffic": sum(step.moves for _, step in taken if step.kind == TRAFFIC),
        }
    return replace(placement, metrics=metrics)


def _within(
    problem: Problem, current: Placement, budget: Budget, goal: TrafficGoal | None
) -> tuple[Placement, list[tuple[int, Step]]]:
    """The placement, and (layer, step) of all that was done."""
    steps_L = find_steps(problem, current, budget, goal)
    taken_L = _afford(steps_L, budget)
    slots_LP = current.physical_to_logical_map.copy()
    for layer, steps in enumerate(steps_L):
        for step in steps[: taken_L[layer]]:
            for slot, expert in step.changes:
                slots_LP[layer, slot] = expert
    changed = bool((slots_LP != current.physical_to_logical_map).any())
    weight_LP = fill_weights(problem, slots_LP)
    placement = Placement(slots_LP, problem.num_gpus, problem.num_nodes, current.epoch + changed, {}, weight_LP)
    return placement, [(layer, step) for layer, steps in enumerate(steps_L) for step in steps[: taken_L[layer]]]


def _largest(problem: Problem, placement: Placement) -> np.ndarray:
    """float64 [L]: the busiest GPU's time."""
    return gpu_time(placement, problem.load_LE, problem.speed_G, placement.weight_LP).max(1)


def find_steps(
    problem: Problem, current: Placement, budget: Budget, goal: TrafficGoal | None = None
) -> list[list[Step]]:
    """Per layer, the steps in the order in which they were found; each supposes those before it."""
    max_moves = min(budget.max_moves_per_layer, 4 * problem.num_slots)
    most = 2 * max_moves + (1 + problem.min_copies) * problem.num_slots
    change_LC4 = np.empty((problem.num_layers, most, 4), dtype=np.int64)
    gain_LC = np.empty((problem.num_layers, most))
    num_L = np.empty(problem.num_layers, dtype=np.int64)
    moves_L = np.full(problem.num_layers, max_moves, dtype=np.int64)
    now_LP = np.ascontiguousarray(current.physical_to_logical_map)
    sample = None if goal is None else goal.tokens.for_search()
    call(
        "eprt_incremental",
        problem.as_c(),
        now_LP,
        moves_L,
        budget.min_gain,
        None if sample is None else sample.as_c(),
        0 if goal is None else OBJECTIVES[goal.objective],
        0.0 if goal is None else float(goal.allowance),
        most,
        change_LC4,
        gain_LC,
        num_L,
    )
    return [_steps(change_LC4[layer, :num], gain_LC[layer]) for layer, num in enumerate(num_L)]


def _steps(change_C4: np.ndarray, gain_C: np.ndarray) -> list[Step]:
    steps: list[Step] = []
    last = -1
    for (slot, expert, step, kind), gain in zip(change_C4.tolist(), gain_C.tolist()):
        if step != last:
            steps.append(Step(((slot, expert),), gain, kind))
            last = step
        else:
            steps[-1] = Step((*steps[-1].changes, (slot, expert)), gain, kind)
    return steps


def _afford(steps_L: list[list[Step]], budget: Budget) -> list[int]:
    """How many steps of each layer to take: repairs, then balance, then traffic, each by gain per byte; inside a
    layer in order."""
    bytes_L = budget.bytes_L
    if budget.max_bytes is None or bytes_L is None:
        return [len(steps) for steps in steps_L]
    taken_L = [sum(step.kind == REPAIR for step in steps) for steps in steps_L]
    left = budget.max_bytes
    for layer, steps in enumerate(steps_L):
        left -= sum(step.moves for step in steps[: taken_L[layer]]) * bytes_L[layer]
    heap: list[tuple[int, float, int]] = []

    def offer(layer: int) -> None:
        if taken_L[layer] < len(steps_L[layer]):
            step = steps_L[layer][taken_L[layer]]
            heapq.heappush(heap, (step.kind, -step.gain / (step.moves * bytes_L[layer]), layer))

    for layer in range(len(steps_L)):
        offer(layer)
    while heap:
        _, _, layer = heapq.heappop(heap)
        cost = steps_L[layer][taken_L[layer]].moves * bytes_L[layer]
        if cost <= left:  # a dearer next step closes its layer: later ones suppose it
            left -= cost
            taken_L[layer] += 1
            offer(layer)
    return taken_L


def fill_weights(problem: Problem, slots_LP: np.ndarray) -> np.ndarray:
    """float64 [L, P]: the slot weights with which these slots carry the load most evenly."""
    weight_LP = np.empty(slots_LP.shape)
    target_L = problem.load_LE.sum(1) / problem.speed_G[problem.usable_LG.any(0)].sum() * 1.0002
    call("eprt_weights", problem.as_c(), np.ascontiguousarray(slots_LP), target_L, weight_LP)
    return weight_LP
