"""`eprt plan-cluster`: exchange, steps, memory and cost of a model by the size of its expert-parallel groups."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from eprt.cluster import report
from eprt.cluster.cluster_layout import ClusterLayout
from eprt.cluster.cluster_plan import ClusterPlan
from eprt.cluster.gpu_speed import SPEEDS
from eprt.cluster.model_cost import ModelCost
from eprt.cluster.step_time import Workload
from eprt.config import EngineConfig
from eprt.model_config import require
from eprt.models.hf_config import read_model_config

_ITEMSIZE = {"fp8": 1.0, "int8": 1.0, "bf16": 2.0}
_FASTEST_NIC_GBPS = 250.0  # beyond any card; a larger --nic is a figure in Gbit/s


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="eprt plan-cluster", description=__doc__, allow_abbrev=False)
    add = parser.add_argument
    add(
        "--model",
        type=Path,
        required=True,
        metavar="DIR",
        help="directory with the model's config.json; weights are not read",
    )
    add("--nodes", metavar="N", type=int, required=True, help="nodes of the cluster")
    add("--gpus-per-node", metavar="N", type=int, default=8, help="GPUs of a node, default %(default)s")
    add(
        "--nic",
        type=float,
        default=50.0,
        help="GB/s of each GPU's network card, default %(default)s (400 Gbit/s)",
    )
    add("--gpu", choices=list(SPEEDS), default="h200", help="GPU whose kernel times are used, default %(default)s")
    add(
        "--requests",
        metavar="N",
        type=int,
        default=128,
        help="requests that decode at once on each GPU, default %(default)s",
    )
    add("--prompt", metavar="N", type=int, default=4096, help="tokens of a prompt, default %(default)s")
    add("--output", metavar="N", type=int, default=1024, help="tokens of an answer, default %(default)s")
    add(
        "--prefill-tokens",
        metavar="N",
        type=int,
        default=8192,
        help="prompt tokens per step and GPU, default %(default)s",
    )
    add(
        "--accepted",
        metavar="X",
        type=float,
        default=1.0,
        help="tokens per request and step, default %(default)s; above 1 with drafts",
    )
    add(
        "--redundant-experts",
        metavar="N",
        type=int,
        default=0,
        help="extra copies of experts in each layer, default %(default)s",
    )
    add("--weights", choices=list(_ITEMSIZE), help="format of the weights; default: that of config.json")
    add(
        "--price",
        metavar="USD",
        type=float,
        help="USD per GPU and hour: also prints the cost of a million output tokens",
    )
    add("--json", metavar="FILE", type=Path, help="also write all figures to this file")
    add("--plot", metavar="FILE", type=Path, help="also draw a curve for each quantity (needs matplotlib)")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """0, or 2 with one line for what cannot be planned."""
    arguments = parser().parse_args(argv)
    try:
        for flag, path in (("--json", arguments.json), ("--plot", arguments.plot)):
            _require_writable(flag, path)
        if arguments.plot:
            from eprt.cluster.plot import require_format

            require_format(arguments.plot)
        plan = make_plan(arguments)
        rows = list(plan.rows())
        if not rows:
            raise ValueError(f"{plan.layout.gpus_per_node} GPUs a node are more than the model's experts")
        print(report.text(plan, rows))
        if left_out := plan.layout.num_gpus - max(row.num_ranks for row in rows):
            print(
                f"\nNo group has more GPUs than the model has experts, --redundant-experts counted: {left_out} of "
                f"{plan.layout.num_gpus} GPUs are for further groups."
            )
        if arguments.json:
            arguments.json.write_text(json.dumps(report.to_json(plan, rows), indent=1) + "\n")
        if arguments.plot:
            from eprt.cluster.plot import draw

            draw(rows, arguments.plot)
    except ModuleNotFoundError as error:
        print(f"eprt plan-cluster: --plot: {error.name} is not installed; pip install {error.name}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # `eprt` knows of readers that have seen enough
        raise
    except (ValueError, OSError) as error:
        print(f"eprt plan-cluster: {error}", file=sys.stderr)
        return 2
    return 0


def _require_writable(flag: str, path: Path | None) -> None:
    """Before anything is computed and printed."""
    if path is None:
        return
    require(not path.is_dir(), f"{flag} {path}: is a directory; name a file in it")
    require(path.parent.is_dir(), f"{flag} {path}: there is no directory {path.parent}; make it first")


def make_plan(arguments: argparse.Namespace) -> ClusterPlan:
    directory = arguments.model.parent
    what = f"is a file; give the directory that its config.json is in, as {directory}"
    require(not arguments.model.is_file(), f"--model {arguments.model}: {what}")
    nic = arguments.nic
    in_bits = f"it is in GB/s; a card of {nic:g} Gbit/s has --nic {nic / 8:g}"
    require(not nic > _FASTEST_NIC_GBPS, f"--nic {nic:g}: must be at most {_FASTEST_NIC_GBPS:g}; {in_bits}")
    layout = ClusterLayout(arguments.nodes, arguments.gpus_per_node, nic, arguments.gpu)
    config = read_model_config(EngineConfig(model_dir=str(arguments.model)))
    weights = arguments.weights or ("fp8" if config.quant_method == "fp8" else "bf16")
    model = ModelCost(config, _ITEMSIZE[weights], _ITEMSIZE[weights])
    work = Workload(
        arguments.requests, arguments.prompt, arguments.output, arguments.prefill_tokens, arguments.accepted
    )
    return ClusterPlan(layout, model, work, arguments.redundant_experts, arguments.price)


if __name__ == "__main__":
    from eprt import cli

    sys.exit(cli.main(["plan-cluster", *sys.argv[1:]]))
