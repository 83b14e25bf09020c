"""Options that several subcommands share, and the arguments of plan() that follow from them."""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ..affinity import OBJECTIVES
from ..formats import read_load
from ..loads import LoadFile
from ..placement import Placement, contiguous_row, fewest_slots
from ..trace import RoutingTrace

# One expert of DeepSeek-V3 in fp8: three matrices of 7168 x 2048 and their block scales.
DEEPSEEK_V3_EXPERT_BYTES = 44_050_944


# The least value of each flag that counts or measures something; a subcommand has some of them.
_LEAST = {
    "num_gpus": 1,
    "num_slots": 1,
    "num_nodes": 1,
    "num_groups": 1,
    "usable_slots": 1,
    "min_gpus_per_expert": 1,
    "seed": 0,
    "last": 1,
    "windows": 1,
    "tokens": 0,
    "memory": 1,
    "every": 1,
    "first_layer": 0,
    "max_moves_per_layer": 0,
    "max_bytes": 0,
    "balance_allowance": 0,
}

# What each must be below; else 2^63. Beyond, the planner's 32-bit integers and the memory of any machine end.
_BELOW_POWER = {"num_gpus": 20, "num_slots": 31, "usable_slots": 31, "window_s": 30}
_TRAFFIC, _ALLOWANCE = "node_copies", 0.02  # what plans reduce, and at which cost in balance, unless flags say
_SPEEDS = 1e-6, 1e6  # of GPUs relative to each other; arithmetic with more than that between them has no digits left


def add_load(parser: argparse.ArgumentParser) -> None:
    text = (
        ".npz, .json or .jsonl of eprt, SGLang or RTP-LLM, SGLang's .pt, or a directory of SGLang's or "
        "TensorRT-LLM's dumps (docs/files.md)"
    )
    parser.add_argument("--load", required=True, metavar="FILE", type=Path, help=text)


def add_cluster(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--num-gpus", type=int, required=True, metavar="N", help="GPUs of all nodes; for a server of eprt its ranks")
    for flag, default, text in (
        ("--num-slots", None, "physical slots of all GPUs; default: no spare slots"),
        ("--num-nodes", 1, "nodes, GPUs in node order; default %(default)s"),
        ("--num-groups", 1, "expert groups of the router (DeepSeek-V3: 8); default %(default)s"),
        ("--usable-slots", None, "slots of each GPU to fill; the rest stay empty"),
        ("--min-gpus-per-expert", 1, "GPUs that hold each expert, default %(default)s; 2 survives the loss of any GPU"),
        ("--seed", 0, "how ties are broken; 0 (default) is by index"),
    ):
        add(flag, type=int, default=default, metavar="N", help=text)
    speeds, gpus = partial(_listed, float, "numbers"), partial(_listed, int, "integers")
    add("--gpu-speed", type=speeds, metavar="S,S,...", help="relative speed of each GPU; 0: masked")
    add("--masked-gpus", type=gpus, metavar="G,G,...", help="GPUs that must stay empty")


def add_traffic(parser: argparse.ArgumentParser, *, with_allowance: bool = True, optional: bool = False) -> None:
    """optional: the subcommand may do without traces; then flags that were not given are None."""
    add = parser.add_argument
    text = f"which traffic between nodes to reduce, default {_TRAFFIC}"
    add("--traffic", choices=list(OBJECTIVES), default=None if optional else _TRAFFIC, help=text)
    add("--any-source", action="store_true", help="ignore the ranks of the tokens, recorded on another cluster")
    if not with_allowance:
        return
    text = f"fraction by which the largest GPU load may exceed that of a plan for balance alone; default {_ALLOWANCE}"
    add("--balance-allowance", type=float, default=None if optional else _ALLOWANCE, metavar="X", help=text)


def add_max_moves(parser) -> None:
    text = "slots of a layer that one plan may change; default 8 or more (docs/rebalancing.md)"
    parser.add_argument("--max-moves-per-layer", type=int, metavar="N", help=text)


def add_plots(parser: argparse.ArgumentParser) -> None:
    text = "write PNG plots and report.html there (needs the extra eprt[plots])"
    parser.add_argument("--plots", metavar="DIR", type=Path, help=text)


def check_numbers(arguments: argparse.Namespace) -> None:
    """ValueError names the first flag that no plan can have, before any file is read."""
    for name, least in _LEAST.items():
        value = getattr(arguments, name, None)
        power = _BELOW_POWER.get(name, 63)
        if value is not None and not least <= value < 2**power:
            raise ValueError(f"--{name.replace('_', '-')} {value}: must be at least {least} and below 2^{power}")
    for name in ("bytes_per_expert", "window_s"):
        value = getattr(arguments, name, None)
        power = _BELOW_POWER.get(name, 63)
        if value is not None and not 0 < value < 2**power:
            raise ValueError(f"--{name.replace('_', '-')} {value}: must be above 0 and below 2^{power}")
    for name in ("out", "plots"):
        if (value := getattr(arguments, name, None)) is not None:
            _check_writable(name, str(value))


def _check_writable(name: str, given: str) -> None:
    """Before minutes of planning or recording."""
    path = Path(given)
    if name == "plots":
        if path.exists() and not (path.is_dir() and os.access(path, os.W_OK)):
            raise ValueError(f"--plots {given}: must name a directory that can be written")
    elif not given or path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ValueError(f"--out {given}: must name a file in a directory that can be written")


def read_load_file(arguments: argparse.Namespace) -> LoadFile:
    """--load, with its notes on standard error."""
    file = read_load(arguments.load)
    for note in file.notes:
        print_status(f"{arguments.load}: {note}")
    return file


def print_status(text: str) -> None:
    """One line on standard error; standard output is for results."""
    print(f"eprt balance: {text}", file=sys.stderr)


def cluster_arguments(arguments: argparse.Namespace, num_experts: int) -> dict[str, Any]:
    """Keyword arguments of plan() that describe the cluster."""
    names = ("num_gpus", "num_nodes", "num_groups", "min_gpus_per_expert", "seed", "num_slots", "usable_slots")
    chosen = {name: value for name in names if (value := getattr(arguments, name)) is not None}
    if arguments.num_slots is None:
        chosen["num_slots"] = fewest_slots(num_experts, arguments.num_gpus)
    most = num_experts * arguments.num_gpus
    if chosen["num_slots"] > most:
        raise ValueError(f"--num-slots {chosen['num_slots']}: no GPU needs an expert twice; use at most {most}")
    speed_G = _speeds(arguments)
    for gpu in arguments.masked_gpus or ():
        if not 0 <= gpu < len(speed_G):
            raise ValueError(f"--masked-gpus: {gpu} is not one of the GPUs 0 to {len(speed_G) - 1}")
        speed_G[gpu] = 0
    if not speed_G.any():
        raise ValueError("--gpu-speed, --masked-gpus: every GPU is masked: none is left to hold experts")
    if arguments.gpu_speed is not None or arguments.masked_gpus:
        chosen["gpu_speed"] = speed_G
    return chosen


def _speeds(arguments: argparse.Namespace) -> np.ndarray:
    if arguments.gpu_speed is None:
        return np.ones(arguments.num_gpus)
    speed_G = np.array(arguments.gpu_speed)
    if len(speed_G) != arguments.num_gpus:
        raise ValueError(f"--gpu-speed has {len(speed_G)} numbers: must be one for each of {arguments.num_gpus} GPUs")
    least, most = _SPEEDS
    for speed in speed_G.tolist():
        if speed != 0 and not least <= speed <= most:
            raise ValueError(f"--gpu-speed {speed:g}: must be from {least:g} to {most:g}, or 0 for a masked GPU")
    return speed_G


def traffic_arguments(arguments: argparse.Namespace) -> dict[str, Any]:
    """Keyword arguments of plan() beside coactivation that reduce traffic."""
    allowance = arguments.balance_allowance
    return {
        "traffic": arguments.traffic or _TRAFFIC,
        "balance_allowance": _ALLOWANCE if allowance is None else allowance,
    }


def usable_trace(arguments: argparse.Namespace, trace: RoutingTrace) -> RoutingTrace:
    """The trace, with --any-source without the ranks of its tokens."""
    return trace.without_sources() if arguments.any_source else trace


def read_placement(path: Path, num_gpus: int | None, num_nodes: int | None) -> Placement:
    """A placement file of eprt, a server's answer, or a file of SGLang, which has only physical_to_logical_map."""
    try:
        data = json.loads(path.read_text())
        if isinstance(data, dict):
            data.setdefault("num_gpus", num_gpus)
            data.setdefault("num_nodes", num_nodes or 1)
            _check_cells(data.get("physical_to_logical_map"))
        return Placement.from_json(data)
    except UnicodeDecodeError:
        raise ValueError(f"{path}: not text in UTF-8; a placement is a JSON file") from None
    except RecursionError:
        raise ValueError(f"{path}: lists or objects nested too deep to be a placement") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _check_cells(rows: Any) -> None:
    """ValueError names the first slot that holds a list or an object; what else is wrong Placement finds."""
    for layer, row in enumerate(rows if isinstance(rows, list) else ()):
        for slot, expert in enumerate(row if isinstance(row, list) else ()):
            if isinstance(expert, (list, dict)):
                where = f"physical_to_logical_map[layer {layer}, slot {slot}]"
                raise ValueError(f"{where} is {json.dumps(expert)[:40]}: must be one expert's number, or -1")


def check_fits(path: Path, placement: Placement, load: Path, load_LE: np.ndarray) -> None:
    """ValueError names both files where they are of different models."""
    have, want = load_LE.shape, placement.replica_count.shape
    if have != want:
        sizes = f"{want[0]} layers of {want[1]} experts, {load} has {have[0]} of {have[1]}"
        raise ValueError(f"{path}: {sizes}: a placement of another model")


def contiguous_placement(load_shape: Sequence[int], cluster: dict[str, Any]) -> Placement:
    """The placement without a balancer: one copy of each expert, in order, on the GPUs that are not masked."""
    num_layers, num_experts = load_shape
    num_gpus = cluster["num_gpus"]
    live_gpus = np.flatnonzero(cluster.get("gpu_speed", np.ones(num_gpus))).tolist()
    row_P = contiguous_row(num_experts, num_gpus, cluster["num_slots"], live_gpus)
    return Placement(np.tile(row_P, (num_layers, 1)), num_gpus, cluster["num_nodes"])


def _listed(kind: type, words: str, text: str) -> list:
    try:
        return [kind(word) for word in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a comma-separated list of {words}") from None
