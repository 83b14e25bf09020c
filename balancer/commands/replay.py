"""eprt balance replay: how each policy would have balanced recorded load, window by window."""

import argparse
import json
from typing import Any

from .. import plots
from ..loads import LoadFile
from ..replay import Replay, TraceSplit, policies, replay
from . import options
from .tables import table

DEFAULT = ["none", "eplb", "incremental", "affinity"]


def add_parser(commands) -> None:
    parser = commands.add_parser("replay", help="judge policies on recorded load, window by window")
    options.add_load(parser)
    options.add_cluster(parser)
    add = parser.add_argument
    text = (
        "any of none, eplb (from scratch), scratch (plan() from scratch), aligned (the same with GPUs renamed to "
        "move less), incremental, affinity; default: none,eplb,incremental and affinity if the file has traces"
    )
    add("--policies", type=lambda names: names.split(","), metavar="A,B,...", help=text)
    add("--windows", type=int, metavar="N", help="group the file's windows into N windows")
    add("--memory", type=int, default=1, metavar="N", help="plan from the last N windows; default 1")
    add("--every", type=int, default=1, metavar="N", help="plan every N windows; default 1")
    options.add_max_moves(parser)
    text = "weights of one expert of one layer; default: DeepSeek-V3 in fp8, %(default)s"
    add("--bytes-per-expert", type=float, default=options.DEEPSEEK_V3_EXPERT_BYTES, metavar="B", help=text)
    options.add_traffic(parser)
    add("--json", action="store_true", help="print the figures of every window as JSON instead of a table")
    options.add_plots(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    if arguments.plots:
        plots.pyplot()  # fail before the work if matplotlib is missing
    file = options.read_load_file(arguments)
    file = file.regrouped(arguments.windows) if arguments.windows else file
    replays = replay_all(arguments, file)
    rows = [summary(one, arguments.bytes_per_expert, arguments.num_gpus) for one in replays]
    text = table(rows)
    print(json.dumps(document(replays, rows), indent=1) if arguments.json else text)
    if arguments.plots:
        pngs = plots.plot_replays(arguments.plots, replays, arguments.bytes_per_expert, arguments.traffic)
        page = plots.write_page(arguments.plots, f"Replay of {arguments.load.name}", text, pngs)
        options.print_status(f"wrote {page} and {', '.join(png.name for png in pngs)} beside it")
    return 0


def replay_all(arguments: argparse.Namespace, file: LoadFile) -> list[Replay]:
    cluster = options.cluster_arguments(arguments, file.load_WLE.shape[2])
    goal = tokens = None
    if file.trace is not None and arguments.num_nodes > 1:
        tokens = TraceSplit(options.usable_trace(arguments, file.trace))
        goal = options.traffic_arguments(arguments)
    names = arguments.policies or [name for name in DEFAULT if name != "affinity" or goal is not None]
    start = options.contiguous_placement(file.load_WLE.shape[1:], cluster)
    shared = {"memory": arguments.memory, "every": arguments.every, "tokens": tokens, "objective": arguments.traffic}
    chosen = policies(cluster, goal, arguments.max_moves_per_layer, names)
    return [replay(name, policy, file.load_WLE, start, **shared) for name, policy in chosen.items()]


def summary(one: Replay, bytes_per_expert: float, num_gpus: int) -> dict[str, Any]:
    """A row of the table. first_GB are the moves of the first plan, which starts from experts in order, then_GB those
    of all later plans; both are totals of all GPUs."""
    row: dict[str, Any] = {
        "policy": one.name,
        "max/mean": float(one.max_over_mean_V.mean()),
        "worst": float(one.max_over_mean_V.max()),
        "mean/max": float(one.balance_ratio_V.mean()),
        "first_GB": float(one.moves_V[0] * bytes_per_expert / 1e9),
        "then_moves": one.later_moves,
        "then_GB": float(one.later_moves * bytes_per_expert / 1e9),
        "GB/GPU/plan": float(one.later_moves * bytes_per_expert / 1e9 / num_gpus / max(1, (one.moves_V[1:] > 0).sum())),
    }
    return row if one.traffic_V is None else {**row, "traffic/token": float(one.traffic_V.mean())}


def document(replays: list[Replay], rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "schema": "eprt.replay/1",
        "policies": [
            {
                **row,
                "max_over_mean": one.max_over_mean_V.tolist(),
                "balance_ratio": one.balance_ratio_V.tolist(),
                "moves": one.moves_V.tolist(),
                "traffic_per_token": None if one.traffic_V is None else one.traffic_V.tolist(),
            }
            for one, row in zip(replays, rows)
        ],
    }
