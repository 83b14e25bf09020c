"""Migration: one job as the server reports it, and the placement that serves after a part of it.

Knows nothing of how ranks move experts (eprt/ep/migration/).
"""

from dataclasses import dataclass, replace

import numpy as np

from eprt.balancer import Placement
from eprt.balancer.job import PlanAnswer
from eprt.balancer.migration import Round
from eprt.ep.migration.job import MigrationJob
from eprt.serve.ranks.recovery import recovery_rows


@dataclass
class Migration:
    """One job as GET /v1/eprt/rebalance reports it."""

    job_id: int
    state: str  # "running", "done", "rolled_back", "refused" or "lost"
    reason: str
    from_epoch: int  # of the placement before
    epoch: int  # of the placement that serves now
    num_rounds: int
    rounds_done: int
    moves: dict[str, int]  # experts to move, by way ("local", "network", "fan_out")
    plan_ms: float
    started_s: float  # Unix time
    seconds: float = 0.0


def placement_after(before: Placement, job: MigrationJob, rounds_done: int, target: Placement) -> Placement:
    """The placement that serves once the first rounds of a job are committed, as the ranks have it too."""
    slots_LP = before.physical_to_logical_map.copy()
    done = job.rounds[:rounds_done]
    for one in done:
        for layer, row in one.rows.items():
            slots_LP[layer] = row
    last = {layer: k for k, one in enumerate(job.rounds) for layer in one.rows}
    after = Placement(slots_LP, before.num_gpus, before.num_nodes, epoch=before.epoch + rounds_done)
    weight_LP = after.even_weight_LP.copy()
    touched = {layer for one in done for layer in one.rows}
    for layer in range(before.num_layers):
        if layer not in touched:
            weight_LP[layer] = before.weight_LP[layer]
        elif last[layer] < rounds_done and layer in job.weights:
            weight_LP[layer] = job.weights[layer]
    metrics = target.metrics if rounds_done == len(job.rounds) else before.metrics
    return replace(after, slot_weight=weight_LP, metrics=metrics)


def placement_without(placement: Placement, rank: int) -> Placement | None:
    """A placement in which nobody needs this rank's slots, which stay as they are; None where nobody does already.
    CapacityError where the slots of the others do not suffice."""
    slots_LP, per_gpu = placement.physical_to_logical_map, placement.num_slots_per_gpu
    others = [gpu for gpu in range(placement.num_gpus) if gpu != rank]
    held = {gpu: slots_LP[:, gpu * per_gpu : (gpu + 1) * per_gpu].tolist() for gpu in others}
    after_LP = np.array(recovery_rows(held, placement.num_gpus, placement.num_experts))
    own = slice(rank * per_gpu, (rank + 1) * per_gpu)
    after_LP[:, own] = slots_LP[:, own]
    if np.array_equal(after_LP, slots_LP):
        return None
    return Placement(after_LP, placement.num_gpus, placement.num_nodes)


def with_a_commit(answer: PlanAnswer, serves: Placement) -> PlanAnswer:
    """A plan without rounds gets one that moves nothing: what takes effect with a commit, then takes effect."""
    row, weights = (tuple(layers_LP[0].tolist()) for layers_LP in (serves.physical_to_logical_map, serves.weight_LP))
    return replace(answer, rounds=(Round({0: row}, ()),), weights={0: weights})
