"""eprt balance plan: a load file in, a placement file out. Also `python -m eprt.balancer`."""

import argparse
import json
import sys
from collections.abc import Sequence

from .loads import read_load
from .plan import plan


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="eprt balance", description="Plans expert placements from measured load.")
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("plan", help="compute a placement from a load file")
    command.add_argument(
        "--load", required=True, metavar="FILE", help=".npz (array load [windows, layers, experts]) or .json"
    )
    command.add_argument("--num-gpus", type=int, required=True)
    command.add_argument("--num-slots", type=int, help="physical slots of all GPUs; default: no spare ones")
    command.add_argument("--num-nodes", type=int, default=1)
    command.add_argument("--num-groups", type=int, default=1, help="expert groups of the router (DeepSeek-V3: 8)")
    command.add_argument("--last", type=int, metavar="N", help="use only the last N windows of the file")
    command.add_argument("--seed", type=int, default=0, help="how ties are broken; 0 is by index")
    command.add_argument("--out", metavar="FILE", help="where to write the placement; default: standard output")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 0, or 2 when the input cannot be used."""
    arguments = build_parser().parse_args(argv)
    try:
        return _plan(arguments)
    except (ValueError, OSError) as error:
        print(f"eprt balance: {error}", file=sys.stderr)
        return 2


def _plan(arguments: argparse.Namespace) -> int:
    file = read_load(arguments.load)
    if file.has_topk_idx:
        print(
            f"eprt balance: {arguments.load} also holds routing traces (topk_idx); planning does not use them yet",
            file=sys.stderr,
        )
    placement = plan(
        file.total(arguments.last),
        num_slots=arguments.num_slots,
        num_gpus=arguments.num_gpus,
        num_nodes=arguments.num_nodes,
        num_groups=arguments.num_groups,
        seed=arguments.seed,
    )
    metrics = placement.metrics
    print(
        f"{metrics['policy']} placement of {placement.num_experts} experts on {placement.num_slots} slots, "
        f"{placement.num_gpus} GPUs, {placement.num_layers} layers: max/mean GPU load "
        f"{metrics['max_over_mean']:.3f} (worst layer {metrics['worst_layer']}: "
        f"{metrics['max_over_mean_worst_layer']:.3f})",
        file=sys.stderr,
    )
    if arguments.out:
        placement.save(arguments.out)
        print(f"wrote {arguments.out}", file=sys.stderr)
    else:
        print(json.dumps(placement.to_json()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
