"""eprt balance plan: computes a placement file from a load file."""

import argparse
import json
from pathlib import Path

import numpy as np

from ..exports import TARGETS, check_file_name, export_placement
from ..formats import read_load
from ..loads import LoadFile
from ..placement import Placement
from ..plan import plan
from ..problem import SHARES
from ..trace import RoutingTrace
from . import options


def add_parser(commands) -> None:
    parser = commands.add_parser("plan", help="compute a placement from a load file")
    options.add_load(parser)
    options.add_cluster(parser)
    parser.add_argument("--last", type=int, metavar="N", help="use only the last N windows of the file")
    parser.add_argument("--out", metavar="FILE", help="where to write the placement; default: standard output")
    _add_export(parser)
    text = "reduce traffic between nodes, using the routing traces (topk_idx) of FILE, default those of --load"
    parser.add_argument("--coactivation", metavar="FILE", type=Path, nargs="?", const=Path(), help=text)
    options.add_traffic(parser, optional=True)
    current = parser.add_argument_group("from the placement in force")
    text = "change this placement, the most useful moves first"
    current.add_argument("--current", metavar="FILE", type=Path, help=text)
    options.add_max_moves(current)
    current.add_argument("--max-bytes", type=float, metavar="B", help="most bytes that move, all layers together")
    current.add_argument("--bytes-per-expert", type=float, metavar="B", help="weights of one expert of one layer")
    parser.set_defaults(run=run)


def _add_export(parser: argparse.ArgumentParser) -> None:
    text = "how the slots of an expert share its tokens; default even with --for another system, else weighted"
    parser.add_argument("--shares", choices=SHARES, help=text)
    text = "the system that will read the file (docs/rebalancing.md); default %(default)s"
    parser.add_argument("--for", dest="target", choices=["eprt", *TARGETS], default="eprt", help=text)
    text = "with --for: the model's layer, from 0, of the load's first row, if FILE does not say it (DeepSeek-V3: 3)"
    parser.add_argument("--first-layer", type=int, metavar="N", help=text)


def run(arguments: argparse.Namespace) -> int:
    _check_belonging(arguments)
    if arguments.target in TARGETS:
        _check_target(arguments)
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
        shares=_shares(arguments),
    )
    options.print_status(_summary(placement))
    if arguments.target in TARGETS:
        text = _exported(arguments, file, load_LE, placement)
    else:
        text = json.dumps(placement.to_json()) + "\n"
    if arguments.out:
        Path(arguments.out).write_text(text)
        options.print_status(f"wrote {arguments.out}{_reader_of(arguments.target)}")
    else:
        print(text, end="")
    return 0


def _check_belonging(arguments: argparse.Namespace) -> None:
    """What would be ignored is refused."""
    for flag, value, other, has_other in (
        ("--first-layer", arguments.first_layer, "--for", arguments.target in TARGETS),
        ("--bytes-per-expert", arguments.bytes_per_expert, "--max-bytes", arguments.max_bytes is not None),
        ("--traffic", arguments.traffic, "--coactivation", arguments.coactivation is not None),
        ("--balance-allowance", arguments.balance_allowance, "--coactivation", arguments.coactivation is not None),
        ("--any-source", arguments.any_source or None, "--coactivation", arguments.coactivation is not None),
    ):
        if value is not None and not has_other:
            raise ValueError(f"{flag} does nothing without {other}: give both or none")


def _check_target(arguments: argparse.Namespace) -> None:
    system = TARGETS[arguments.target].system
    if arguments.shares == "weighted":
        raise ValueError(f"--shares weighted: {system} splits tokens evenly; leave --shares out with --for")
    if arguments.out:
        check_file_name(arguments.target, Path(arguments.out))


def _shares(arguments: argparse.Namespace) -> str:
    default = TARGETS[arguments.target].shares if arguments.target in TARGETS else "weighted"
    return arguments.shares or default


def _exported(arguments: argparse.Namespace, file: LoadFile, load_LE: np.ndarray, placement: Placement) -> str:
    first_layer = file.first_layer if arguments.first_layer is None else arguments.first_layer
    if first_layer is None:
        have = f"{arguments.load} does not say which of the model's layers its first row is about"
        raise ValueError(f"{have}: --for {arguments.target} needs --first-layer (DeepSeek-V3: 3, V2: 1)")
    used_L = load_LE.any(axis=1)
    dense_rows = int(used_L.argmax())  # rows of zeros before the first layer with load: layers without experts
    return export_placement(placement, arguments.target, first_layer=first_layer, dense_rows=dense_rows)


def _reader_of(target: str) -> str:
    return f" for {TARGETS[target].system} ({TARGETS[target].option})" if target in TARGETS else ""


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
