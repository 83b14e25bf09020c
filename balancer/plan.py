"""plan(): from measured expert load to a Placement.

problem.py validates; the native core (csrc/balancer) replicates, packs and improves layer by layer; metrics.py says how
good the result is.
"""

import numpy as np

from .affinity import TokenSample, TrafficGoal, check_nodes, check_objective, plan_for_traffic
from .core import call
from .incremental import Budget, incremental
from .metrics import describe
from .placement import Placement
from .problem import Problem
from .trace import RoutingTrace


def plan(
    load_LE: np.ndarray,
    *,
    num_slots: int | None = None,
    num_gpus: int,
    num_nodes: int = 1,
    num_groups: int = 1,
    coactivation: RoutingTrace | np.ndarray | None = None,
    current: Placement | None = None,
    max_moves_per_layer: int | None = None,
    max_bytes: float | None = None,
    bytes_per_expert: float | np.ndarray | None = None,
    min_gain: float = 0.001,
    traffic: str = "node_copies",
    balance_allowance: float = 0.02,
    gpu_speed: np.ndarray | None = None,
    usable_slots: int | np.ndarray | None = None,
    min_gpus_per_expert: int = 1,
    seed: int = 0,
    threads: int | None = None,
) -> Placement:
    """Chooses which experts get copies and where each copy lives; never two copies of one expert on one GPU.

    load_LE: [L, E], tokens (or any other additive cost) per expert; finite, not negative.
    num_slots: P, default the fewest that hold all experts (or those of current); a multiple of num_gpus.
    num_groups: expert groups of the router; whole inside nodes when num_nodes divides num_groups, else ignored.
    coactivation: a RoutingTrace, or a symmetric [L, E, E] matrix of tokens that chose both experts (diagonal: the one).
        Experts are then laid out, and copied across nodes, for less traffic; groups need no longer stay whole.
    current: the placement in force. The plan then changes at most max_moves_per_layer slots per layer (default 8; with
        at most four slots per GPU a third of the GPUs if that is more), the most useful first, and stops below
        min_gain: a fraction of the mean load off one of the largest GPU loads, or, for moves that balance does not need
        and coactivation puts to use, crossings per token.
    max_bytes, bytes_per_expert (number or [L]): a limit over all layers, instead of or beside max_moves_per_layer.
    traffic: "node_copies" or "expert_messages", see affinity.py. balance_allowance: the fraction by which a layer's
        largest GPU load (under the slot weights) may exceed the balance-only plan's for less traffic.
    gpu_speed: [G], relative; load is balanced in proportion. 0: the GPU is masked and holds nothing.
    usable_slots: slots per GPU to fill, broadcast to [L, G]; default all. The rest stay EMPTY (-1).
    min_gpus_per_expert: 2 survives the loss of any one rank.
    seed: 0 breaks ties by index; any other value by a random order drawn from it. threads: default one per core.
    ValueError names field, layer and value.
    """
    problem = Problem.of(
        load_LE,
        num_slots=num_slots,
        num_gpus=num_gpus,
        num_nodes=num_nodes,
        num_groups=num_groups,
        current=current,
        gpu_speed=gpu_speed,
        usable_slots=usable_slots,
        min_gpus_per_expert=min_gpus_per_expert,
        seed=seed,
        threads=threads,
    )
    budget = Budget.of(problem, current, max_moves_per_layer, max_bytes, bytes_per_expert, min_gain)
    goal = _goal(problem, coactivation, traffic, balance_allowance)
    if current is not None:
        return incremental(problem, current, budget, goal)
    balanced = from_scratch(problem)
    return balanced if goal is None else plan_for_traffic(problem, balanced, goal)


def _goal(
    problem: Problem, coactivation: RoutingTrace | np.ndarray | None, traffic: str, allowance: float
) -> TrafficGoal | None:
    check_objective(traffic)
    if not 0 <= allowance < np.inf:
        raise ValueError(f"balance_allowance={allowance}: must be finite and at least 0")
    if coactivation is None:
        return None
    check_nodes(problem.num_nodes)
    shape = (problem.num_layers, problem.num_experts, problem.num_gpus, problem.num_nodes)
    return TrafficGoal(TokenSample.of(coactivation, *shape), traffic, float(allowance))


def from_scratch(problem: Problem) -> Placement:
    """The best balance that can be found, whatever is in force now."""
    slots_LP = np.empty((problem.num_layers, problem.num_slots), dtype=np.int64)
    weight_LP = np.empty(slots_LP.shape)
    bound_L = np.empty(problem.num_layers)
    call("eprt_plan", problem.as_c(), slots_LP, weight_LP, bound_L)
    placement = Placement(slots_LP, problem.num_gpus, problem.num_nodes, slot_weight=weight_LP)
    metrics = describe(problem, placement, bound_L)
    return Placement(slots_LP, problem.num_gpus, problem.num_nodes, metrics=metrics, slot_weight=weight_LP)
