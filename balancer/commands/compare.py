"""eprt balance compare: plans and placement files side by side, on the same load."""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

from .. import plots
from ..affinity import traffic_per_token
from ..moves import moved_slots
from ..placement import Placement
from ..plan import plan
from ..replay import eplb_placement, halves
from ..trace import RoutingTrace
from . import options
from .tables import table

ALLOWANCES = (0.0, 0.02, 0.05, 0.1, 0.2)


def add_parser(commands) -> None:
    parser = commands.add_parser("compare", help="plans and placement files side by side, on the same load")
    options.add_load(parser)
    options.add_cluster(parser)
    parser.add_argument("placements", nargs="*", type=Path, metavar="PLACEMENT", help="placement files to include")
    parser.add_argument("--last", type=int, metavar="N", help="use only the last N windows of the file")
    options.add_traffic(parser, with_allowance=False)  # it compares several
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options.add_plots(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    if arguments.plots:
        plots.pyplot()
    file = options.read_load_file(arguments)
    load_LE = file.total(arguments.last)
    seen = judged = None
    if file.trace is not None and arguments.num_nodes > 1:
        seen, judged = halves(options.usable_trace(arguments, file.trace))
    cluster = options.cluster_arguments(arguments, load_LE.shape[1])
    candidates = {"none": options.contiguous_placement(load_LE.shape, cluster)}
    candidates |= _plans(arguments, load_LE, cluster, seen)
    given = {}
    for path in arguments.placements:
        placement = options.read_placement(path, arguments.num_gpus, arguments.num_nodes)
        if placement.num_gpus != arguments.num_gpus:
            raise ValueError(f"{path}: a placement on {placement.num_gpus} GPUs, --num-gpus is {arguments.num_gpus}")
        given[str(path) if path.stem in candidates | given else path.stem] = placement
        options.check_fits(path, placement, arguments.load, load_LE)
    candidates |= given
    start, traffic = candidates["none"], arguments.traffic
    rows = [_row(name, one, load_LE, start, judged, traffic) for name, one in candidates.items()]
    text = table(rows)
    print(json.dumps({"schema": "eprt.compare/1", "plans": rows}, indent=1) if arguments.json else text)
    if arguments.plots:
        _plots(arguments, load_LE, candidates, list(given), rows, text)
    return 0


def _plans(
    arguments: argparse.Namespace, load_LE: np.ndarray, cluster: dict, seen: RoutingTrace | None
) -> dict[str, Placement]:
    plans = {}
    if not {"gpu_speed", "usable_slots"} & set(cluster):
        plans["eplb"] = eplb_placement(load_LE, cluster)
    plans["plan"] = plan(load_LE, **cluster)
    for allowance in ALLOWANCES if seen is not None else ():
        goal = {"coactivation": seen, "traffic": arguments.traffic, "balance_allowance": allowance}
        plans[f"affinity {allowance:g}"] = plan(load_LE, **cluster, **goal)
    return plans


def _row(
    name: str, placement: Placement, load_LE: np.ndarray, start: Placement, judged: RoutingTrace | None, objective: str
) -> dict[str, Any]:
    load_LG = placement.gpu_load(load_LE)
    skew_L = load_LG.max(1) / np.maximum(load_LG.mean(1), 1e-300)
    row: dict[str, Any] = {
        "plan": name,
        "max/mean": float(skew_L.mean()),
        "worst layer": float(skew_L.max()),
        "most copies": int(placement.replica_count.max()),
        "doubled": _num_doubled(placement),
    }
    if placement.num_slots == start.num_slots and placement.num_nodes == start.num_nodes:
        row["moved slots"] = int(moved_slots(start, placement).sum())
    if judged is not None and placement.num_nodes > 1:
        row["traffic/token"] = float(traffic_per_token(placement, judged, objective).mean())
    return row


def _num_doubled(placement: Placement) -> int:
    """Slots that hold an expert that their GPU already holds in another slot: wasted memory."""
    sorted_LGS = np.sort(placement.physical_to_logical_map.reshape(placement.num_layers, placement.num_gpus, -1))
    return int(((np.diff(sorted_LGS) == 0) & (sorted_LGS[..., 1:] >= 0)).sum())


def _plots(arguments, load_LE, candidates: dict[str, Placement], given: list[str], rows, text: str) -> None:
    folder = arguments.plots
    folder.mkdir(parents=True, exist_ok=True)
    names = [name for name in ("none", "eplb", "plan", f"affinity {ALLOWANCES[1]:g}") if name in candidates]
    loads = {name: candidates[name].gpu_load(load_LE) for name in [*names, *given]}
    skews = {row["plan"]: row["max/mean"] for row in rows}
    pngs = [
        plots.gpu_load(folder / "gpu_load.png", loads, "Load of each GPU"),
        plots.bars(folder / "balance.png", skews, "Balance", "max/mean GPU load"),
    ]
    points = {row["plan"]: (row["max/mean"], row.get("traffic/token")) for row in rows}
    points["none"] = (points["none"][0], None)  # so far from the others that it would hide their differences
    if any(crossings is not None for _, crossings in points.values()):
        label = f"{arguments.traffic.replace('_', ' ')} per token and layer"
        pngs.append(plots.scatter(folder / "trade.png", points, "Balance against traffic, on unseen tokens", label))
    page = plots.write_page(folder, f"Plans for {arguments.load.name}", text, pngs)
    options.print_status(f"wrote {page} and {', '.join(png.name for png in pngs)} beside it")
