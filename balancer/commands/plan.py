"""eprt balance plan: computes a placement file from a load file."""

import argparse
import json
from pathlib import Path

from ..formats import read_load
from ..placement import Placement
from ..plan import plan
from ..trace import RoutingTrace
from . import options


def add_parser(commands) -> None:
    parser = commands.add_parser("plan", help="compute a placement from a load file")
    options.add_load(parser)
    options.add_cluster(parser)
    parser.add_argument("--last", type=int, metavar="N", help="use only the last N windows of the file")
    parser.add_argument("--out", metavar="FILE", help="where to write the placement; default: standard output")
    text = "reduce traffic between nodes, using the routing traces (topk_idx) of FILE, default those of --load"
    parser.add_argument("--coactivation", metavar="FILE", type=Path, nargs="?", const=Path(), help=text)
    options.add_traffic(parser)
    current = parser.add_argument_group("from the placement in force")
    text = "change this placement, the most useful moves first"
    current.add_argument("--current", metavar="FILE", type=Path, help=text)
    options.add_max_moves(current)
    current.add_argument("--max-bytes", type=float, metavar="B", help="most bytes that move, all layers together")
    current.add_argument("--bytes-per-expert", type=float, metavar="B", help="weights of one expert of one layer")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    file = options.read_load_file(arguments)
    load_LE = file.total(arguments.last)
    cluster = options.cluster_arguments(arguments, load_LE.shape[1])
    if arguments.current is not None:
        cluster["current"] = options.read_placement(arguments.current, arguments.num_gpus, arguments.num_nodes)
        cluster["num_slots"] = arguments.num_slots
    traffic = {}
    if arguments.coactivation is not None:
        trace = options.usable_trace(arguments, _trace(arguments, file.trace))
        traffic = {"coactivation": trace, **options.traffic_arguments(arguments)}
    elif file.trace is not None and arguments.num_nodes > 1:
        use = "--coactivation uses them to reduce traffic between nodes"
        options.print_status(f"{arguments.load} also holds routing traces; {use}")
    placement = plan(
        load_LE,
        **cluster,
        **traffic,
        max_moves_per_layer=arguments.max_moves_per_layer,
        max_bytes=arguments.max_bytes,
        bytes_per_expert=arguments.bytes_per_expert,
    )
    options.print_status(_summary(placement))
    if arguments.out:
        placement.save(arguments.out)
        options.print_status(f"wrote {arguments.out}")
    else:
        print(json.dumps(placement.to_json()))
    return 0


def _trace(arguments: argparse.Namespace, own: RoutingTrace | None) -> RoutingTrace:
    path = arguments.load if arguments.coactivation == Path() else arguments.coactivation
    trace = own if path == arguments.load else read_load(path).trace
    if trace is None:
        raise ValueError(f"{path} holds no routing traces (topk_idx): --coactivation needs them")
    return trace


def _summary(placement: Placement) -> str:
    metrics = placement.metrics
    text = (
        f"{metrics['policy']} placement of {placement.num_experts} experts on {placement.num_slots} slots, "
        f"{placement.num_gpus} GPUs, {placement.num_layers} layers: max/mean GPU load "
        f"{metrics['max_over_mean']:.3f} (worst layer {metrics['worst_layer']}: "
        f"{metrics['max_over_mean_worst_layer']:.3f})"
    )
    if "traffic" in metrics:
        before = metrics.get("traffic_per_token_balance_only", metrics.get("traffic_per_token_before"))
        text += f"; {metrics['traffic']} per token {metrics['traffic_per_token']:.3f}, before {before:.3f}"
    if "moves" in metrics:
        text += f"; {metrics['moves']} slots move"
    return text
