"""Planning in a separate process, so that it does not delay the server.

    python -m eprt.balancer.job < request > answer.json

A request holds the placement in force and either a load to plan for or the target to reach; the answer holds the target
and the rounds that lead there. Exit status 0, or 2 with one line on standard error if the request cannot be met.

A request is one line of JSON followed by an .npz archive: a routing sample has a million numbers, and the sender serves
requests at the same time, so encoding must be fast. Knows nothing of the server that asks.
"""

import io
import json
import os
import sys
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from .migration import Round, count_moves, schedule_rounds
from .placement import Placement
from .plan import plan
from .trace import RoutingTrace

_NICE = 10  # the server beside it has priority
_LAYERS_PER_ROUND = 8  # in a round that changes only weights, because a round takes effect in one step
_ARRAYS = ("load_LE", "gpu_speed")
_WEIGHT_CHANGE = 0.01  # smaller changes of a slot's share are not sent to the ranks


@dataclass(frozen=True, eq=False)
class PlanRequest:
    """What to plan: a load, or the migration to a given target."""

    current: Placement  # in force
    target: Placement | None = None  # None: plan for load_LE
    load_LE: np.ndarray | None = None  # [L, E]
    node_of_gpu: tuple[int, ...] | None = None  # default by the placement's num_nodes
    spare: int = 2  # as in schedule_rounds
    max_moves_per_layer: int | None = None  # as in plan()
    gpu_speed: np.ndarray | None = None  # [G], as in plan()
    trace: RoutingTrace | None = None  # for plans that save traffic between nodes; every layer has the same T

    def to_bytes(self) -> bytes:
        data = {
            "current": self.current.to_json(),
            "target": self.target and self.target.to_json(),
            "node_of_gpu": self.node_of_gpu,
            "spare": self.spare,
            "max_moves_per_layer": self.max_moves_per_layer,
        }
        arrays = {name: np.asarray(value) for name in _ARRAYS if (value := getattr(self, name)) is not None}
        if self.trace is not None:
            arrays["topk_idx"] = np.stack(self.trace.topk_idx).astype(np.int16)
            if self.trace.source_gpu is not None:
                arrays["source_gpu"] = np.stack(self.trace.source_gpu)
        archive = io.BytesIO()
        np.savez(archive, **arrays)  # type: ignore[arg-type]
        return json.dumps(data).encode() + b"\n" + archive.getvalue()

    @staticmethod
    def from_bytes(request: bytes) -> "PlanRequest":
        """KeyError names the field that is missing."""
        line, _, archive = request.partition(b"\n")
        data = json.loads(line)
        with np.load(io.BytesIO(archive)) as arrays:
            trace = None
            if "topk_idx" in arrays:
                sources = tuple(arrays["source_gpu"]) if "source_gpu" in arrays else None
                trace = RoutingTrace(tuple(arrays["topk_idx"]), sources)
            return PlanRequest(
                Placement.from_json(data["current"]),
                data["target"] and Placement.from_json(data["target"]),
                node_of_gpu=None if data["node_of_gpu"] is None else tuple(data["node_of_gpu"]),
                spare=data["spare"],
                max_moves_per_layer=data["max_moves_per_layer"],
                trace=trace,
                **{name: arrays.get(name) for name in _ARRAYS},
            )


@dataclass(frozen=True, eq=False)
class PlanAnswer:
    """A plan and the migration to it."""

    target: Placement
    rounds: tuple[Round, ...]
    weights: dict[int, tuple[float, ...]]  # layer -> slot weights, for the layers that change
    moves: dict[str, int]  # copies by path (count_moves)
    seconds: float  # time spent on planning

    def to_json(self) -> dict[str, Any]:
        return {
            "target": self.target.to_json(),
            "rounds": [one.to_json() for one in self.rounds],
            "weights": [[layer, list(row)] for layer, row in self.weights.items()],
            "moves": self.moves,
            "seconds": self.seconds,
        }

    @staticmethod
    def from_json(data: dict[str, Any]) -> "PlanAnswer":
        return PlanAnswer(
            Placement.from_json(data["target"]),
            tuple(Round.from_json(one) for one in data["rounds"]),
            {int(layer): tuple(row) for layer, row in data["weights"]},
            data["moves"],
            data["seconds"],
        )


def solve(request: PlanRequest) -> PlanAnswer:
    """ValueError says why the request cannot be met."""
    start_s = time.perf_counter()
    current = request.current
    target = request.target or _plan(request)
    per_node = current.num_gpus // current.num_nodes
    nodes = request.node_of_gpu or tuple(gpu // per_node for gpu in range(current.num_gpus))
    target_LP = target.physical_to_logical_map
    rounds = schedule_rounds(current.physical_to_logical_map, target_LP, nodes, max(request.spare, 1))
    changed = {layer for one in rounds for layer in one.rows}
    reweighted = np.abs(current.weight_LP - target.weight_LP).max(1) > _WEIGHT_CHANGE
    only_weights = [layer for layer in np.flatnonzero(reweighted).tolist() if layer not in changed]
    rows = [(layer, tuple(target_LP[layer].tolist())) for layer in only_weights]
    rounds += [Round(dict(rows[i : i + _LAYERS_PER_ROUND]), ()) for i in range(0, len(rows), _LAYERS_PER_ROUND)]
    weights = {layer: tuple(target.weight_LP[layer].tolist()) for layer in sorted(changed.union(only_weights))}
    seconds = time.perf_counter() - start_s
    return PlanAnswer(target, tuple(rounds), weights, count_moves(rounds, nodes), seconds)


def _plan(request: PlanRequest) -> Placement:
    if request.load_LE is None:
        raise ValueError("the request has neither target nor load_LE")
    current = request.current
    return plan(
        request.load_LE,
        num_slots=current.num_slots,
        num_gpus=current.num_gpus,
        num_nodes=current.num_nodes,
        current=current,
        max_moves_per_layer=request.max_moves_per_layer,
        gpu_speed=request.gpu_speed,
        coactivation=request.trace if current.num_nodes > 1 else None,
        threads=1,
    )


def main() -> int:
    os.nice(_NICE)
    try:
        answer = solve(PlanRequest.from_bytes(sys.stdin.buffer.read()))
    except (KeyError, ValueError) as error:
        print(f"the request has no {error}" if isinstance(error, KeyError) else error, file=sys.stderr)
        return 2
    json.dump(answer.to_json(), sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
