"""Options that several commands share, and what they mean to plan()."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..affinity import OBJECTIVES
from ..formats import read_load
from ..loads import LoadFile
from ..placement import EMPTY, Placement, fewest_slots
from ..trace import RoutingTrace

# One expert of DeepSeek-V3 in fp8: three matrices of 7168 x 2048 and their block scales.
DEEPSEEK_V3_EXPERT_BYTES = 44_050_944


def add_load(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--load",
        required=True,
        metavar="FILE",
        type=Path,
        help=".npz, .json or .jsonl of eprt, SGLang or RTP-LLM, SGLang's .pt, or a directory of SGLang's or "
        "TensorRT-LLM's dumps (docs/files.md)",
    )


def add_cluster(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--num-gpus", type=int, required=True, metavar="N", help="of all nodes; of a server of eprt: its ranks"
    )
    parser.add_argument("--num-slots", type=int, metavar="N", help="physical slots of all GPUs; default: no spare ones")
    parser.add_argument(
        "--num-nodes", type=int, default=1, metavar="N", help="that the GPUs are on, in order; default %(default)s"
    )
    parser.add_argument(
        "--num-groups",
        type=int,
        default=1,
        metavar="N",
        help="expert groups of the router (DeepSeek-V3: 8); default %(default)s",
    )
    parser.add_argument("--gpu-speed", type=_numbers, metavar="S,S,...", help="relative speed of each GPU; 0: masked")
    parser.add_argument("--masked-gpus", type=_integers, metavar="G,G,...", help="GPUs that may hold nothing")
    parser.add_argument("--usable-slots", type=int, metavar="N", help="slots of each GPU to fill; the rest stay empty")
    parser.add_argument(
        "--min-gpus-per-expert",
        type=int,
        default=1,
        metavar="N",
        help="copies on so many GPUs, default %(default)s; 2: survives the loss of any one GPU",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="how ties are broken; 0 (default) is by index")


def add_traffic(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--traffic",
        choices=list(OBJECTIVES),
        default="node_copies",
        help="what is saved between nodes, default %(default)s",
    )
    parser.add_argument(
        "--balance-allowance",
        type=float,
        default=0.02,
        metavar="X",
        help="fraction by which the largest GPU load may exceed that of a plan for balance alone; default %(default)s",
    )
    parser.add_argument(
        "--any-source", action="store_true", help="forget which rank the tokens came from: the cluster is another one"
    )


def add_plots(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--plots", metavar="DIR", type=Path, help="write PNG plots and report.html there (needs the extra eprt[plots])"
    )


def read(arguments: argparse.Namespace) -> LoadFile:
    file = read_load(arguments.load)
    for note in file.notes:
        say(f"{arguments.load}: {note}")
    return file


def say(text: str) -> None:
    print(f"eprt balance: {text}", file=sys.stderr)


def cluster(arguments: argparse.Namespace, num_experts: int) -> dict[str, Any]:
    """Keyword arguments of plan()."""
    names = ("num_gpus", "num_nodes", "num_groups", "min_gpus_per_expert", "seed")
    chosen = {name: getattr(arguments, name) for name in names}
    num_slots = arguments.num_slots
    chosen["num_slots"] = fewest_slots(num_experts, arguments.num_gpus) if num_slots is None else num_slots
    if arguments.usable_slots is not None:
        chosen["usable_slots"] = arguments.usable_slots
    speed_G = np.ones(arguments.num_gpus) if arguments.gpu_speed is None else np.array(arguments.gpu_speed)
    for gpu in arguments.masked_gpus or ():
        if not 0 <= gpu < len(speed_G):
            raise ValueError(f"--masked-gpus: {gpu} is none of the GPUs 0 to {len(speed_G) - 1}")
        speed_G[gpu] = 0
    if arguments.gpu_speed is not None or arguments.masked_gpus:
        chosen["gpu_speed"] = speed_G
    return chosen


def traffic(arguments: argparse.Namespace, trace: RoutingTrace) -> dict[str, Any]:
    """Keyword arguments of plan() that make it save traffic."""
    trace = trace.without_sources() if arguments.any_source else trace
    return {
        "coactivation": trace,
        "traffic": arguments.traffic,
        "balance_allowance": arguments.balance_allowance,
    }


def read_placement(path: Path, num_gpus: int | None, num_nodes: int | None) -> Placement:
    """A placement file of eprt, a server's answer, or SGLang's (physical_to_logical_map alone)."""
    try:
        data = json.loads(path.read_text())
        if isinstance(data, dict):
            data.setdefault("num_gpus", num_gpus)
            data.setdefault("num_nodes", num_nodes or 1)
        return Placement.from_json(data)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def contiguous(file_shape: Sequence[int], chosen: dict[str, Any]) -> Placement:
    """What serves without a balancer: one copy of each expert, in order, on the GPUs that are not masked."""
    num_layers, num_experts = file_shape
    speed_G = chosen.get("gpu_speed", np.ones(chosen["num_gpus"]))
    live = np.flatnonzero(speed_G)
    per_gpu = chosen["num_slots"] // chosen["num_gpus"]
    rows_GS = np.full((chosen["num_gpus"], per_gpu), EMPTY)
    for gpu, experts in zip(live, np.array_split(np.arange(num_experts), len(live))):
        if len(experts) > per_gpu:
            raise ValueError(f"num_slots={chosen['num_slots']}: {len(live)} GPUs cannot hold {num_experts} experts")
        rows_GS[gpu, : len(experts)] = experts
    return Placement(np.tile(rows_GS.ravel(), (num_layers, 1)), chosen["num_gpus"], chosen["num_nodes"])


def _numbers(text: str) -> list[float]:
    return _listed(text, float, "numbers")


def _integers(text: str) -> list[int]:
    return _listed(text, int, "integers")


def _listed(text: str, kind: type, words: str) -> list:
    try:
        return [kind(word) for word in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of {words} with commas between them") from None
