"""RebalanceRequest: the body of POST /v1/eprt/rebalance. Every mistake is named: field, layer and value.

Knows nothing of how a request is carried out (rebalancer.py).
"""

import sys
from dataclasses import dataclass
from typing import Any

from eprt.balancer import Placement
from eprt.serve.errors import invalid, quoted, shortened, unsupported
from eprt.serve.openai.parsing import decode_body

_PLACEMENT_FIELDS = {"physical_to_logical_map", "num_gpus", "num_nodes", "epoch", "metrics", "slot_weight"}
# Fields that GET /v1/eprt/placement adds; they are accepted so that its answer can be edited and posted.
_DESCRIPTIVE_FIELDS = {"num_ranks", "num_experts", "layers"}
_OTHER_MODEL = "it is of another model, or of one with other drafts (`--num-speculative-tokens`)"
MODES = ("off", "auto", "dry-run")
_MOST_MOVES = 2**31 - 1
_FASTEST = sys.float_info.max
_FIELDS = {"placement", "dry_run", "cancel", "max_moves_per_layer", "mode", "rank_speeds"}


@dataclass(frozen=True)
class RebalanceRequest:
    """What a client asks of the rebalancer."""

    target: Placement | None = None  # the placement to reach; None: plan one for the measured load
    dry_run: bool = False  # plan and decide, move nothing
    cancel: bool = False  # roll back the migration under way
    max_moves_per_layer: int | None = None  # of a plan made here
    mode: str | None = None  # the mode from now on
    rank_speeds: tuple[float, ...] | None = None  # for which target was planned; batches are split by them from then on


def parse_rebalance(body: bytes, current: Placement) -> RebalanceRequest:
    """body: JSON. {} or nothing: plan a placement; {"placement": {...}} or a placement file itself: move to that one;
    or {"cancel": true}, or {"mode": "auto"}. ApiError 400 for anything else, and for a placement that does not fit."""
    data = decode_body(body or b"{}")
    if not isinstance(data, dict):
        raise invalid(None, f"the body must be a JSON object, not {quoted(data)}", code="invalid_json")
    if "physical_to_logical_map" in data:
        if "placement" in data:
            raise invalid("placement", "the body has placement and physical_to_logical_map; give one of them")
        placement = {name: data.pop(name) for name in list(data) if name not in _FIELDS}
        data["placement"] = placement
    for name in data:
        if name not in _FIELDS:
            raise unsupported(name, f"unknown field {quoted(name)}; there are: {', '.join(sorted(_FIELDS))}")
    for name in ("dry_run", "cancel"):
        if not isinstance(data.get(name, False), bool):
            raise invalid(name, f"{name}={quoted(data[name])}: must be true or false", code="invalid_type")
    moves = data.get("max_moves_per_layer")
    if moves is not None and (type(moves) is not int or not 1 <= moves <= _MOST_MOVES):
        message = f"max_moves_per_layer={shortened(repr(moves))}: must be an integer in 1..{_MOST_MOVES}"
        raise invalid("max_moves_per_layer", message)
    mode = data.get("mode")
    if mode is not None and mode not in MODES:
        raise invalid("mode", f"mode={quoted(mode)}: must be off, auto or dry-run")
    for name in ("cancel", "mode"):
        if data.get(name) and len(data) > 1:
            raise invalid(name, f"{name} stands alone: give nothing else with it")
    target = None if data.get("placement") is None else _placement(data["placement"], current)
    if moves is not None and target is not None:
        message = "max_moves_per_layer belongs to a plan made here; a posted placement is reached in full"
        raise invalid("max_moves_per_layer", message)
    speeds = _rank_speeds(data.get("rank_speeds"), target, current.num_gpus)
    return RebalanceRequest(target, data.get("dry_run", False), data.get("cancel", False), moves, mode, speeds)


def _rank_speeds(speeds: Any, target: Placement | None, num_ranks: int) -> tuple[float, ...] | None:
    if speeds is None:
        return None
    if target is None:
        raise invalid("rank_speeds", "rank_speeds belongs to a placement that is posted")
    if not isinstance(speeds, list) or len(speeds) != num_ranks:
        raise invalid(
            "rank_speeds", f"rank_speeds={shortened(repr(speeds))}: must be a list of {num_ranks} numbers, one per rank"
        )
    for rank, speed in enumerate(speeds):
        if type(speed) not in (int, float) or not 0 < speed <= _FASTEST:
            message = f"rank_speeds[rank {rank}] = {shortened(repr(speed))}: must be finite and above 0"
            raise invalid("rank_speeds", message)
    return tuple(float(speed) for speed in speeds)


def _placement(data: Any, current: Placement) -> Placement:
    if not isinstance(data, dict):
        raise invalid("placement", f"placement must be an object, not {quoted(data)}", code="invalid_type")
    for name in data:
        if name not in _PLACEMENT_FIELDS | _DESCRIPTIVE_FIELDS:
            raise unsupported(f"placement.{name}", f"unknown field {quoted(name)} in the placement")
    data = {"num_gpus": current.num_gpus, "num_nodes": current.num_nodes, **data}
    _check_experts(data.get("physical_to_logical_map"), current)
    try:
        target = Placement.from_json(data)
    except (ValueError, TypeError) as error:
        raise invalid("placement", str(error)) from None
    for name, what, remedy in (
        ("num_layers", "MoE layers", _OTHER_MODEL),
        ("num_slots", "slots", "make it with `--num-slots {}`"),
        ("num_gpus", "ranks", "make it with `--num-gpus {}`"),
        ("num_nodes", "nodes", "make it with `--num-nodes {}`"),
        ("num_experts", "experts", _OTHER_MODEL),
    ):
        have, want = getattr(target, name), getattr(current, name)
        if have != want:
            have = f"the placement has {have} {what}, this server {want}"
            raise invalid("placement", f"{have}: {remedy.format(want)}")
    return target


def _check_experts(rows: Any, current: Placement) -> None:
    """Names the first row or entry that cannot be this model's; Placement finds all other mistakes."""
    name, last = "physical_to_logical_map", current.num_experts - 1
    for layer, row in enumerate(rows if isinstance(rows, list) else ()):
        if isinstance(row, list) and len(row) != current.num_slots:
            have = f"{name}[layer {layer}] has {len(row)} slots, this server {current.num_slots}"
            raise invalid("placement", f"{have}: make the placement with `--num-slots {current.num_slots}`")
        for slot, expert in enumerate(row if isinstance(row, list) else ()):
            if type(expert) is not int or not -1 <= expert <= last:
                what = (
                    f"{name}[layer {layer}, slot {slot}] = {shortened(repr(expert))}: this model has experts 0..{last}"
                )
                raise invalid("placement", f"{what}, and -1 stands for none; is the placement of another model?")
