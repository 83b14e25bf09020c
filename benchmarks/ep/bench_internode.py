"""Dispatch and combine between nodes, over a wire, beside the cluster planner's prediction.

    python -m benchmarks.bench_internode --wire paced               # virtual nodes, at the pace of a network card
    python -m benchmarks.bench_internode --wire tcp                 # virtual nodes, loopback
    python -m benchmarks.bench_internode --wire tcp --nnodes 2 --node-rank 0 --dist-init-addr HOST:PORT   # on each host
    python -m benchmarks.bench_internode --wire nvshmem             # what it would need here

CPU ranks, started by this program. All of a case start a call together; of the ranks' medians the largest counts.

    sent_kB         counted: bytes that a rank gives to the wire for a dispatch and a combine, the mean of the ranks
    model_kB        the planner's: copies of a token (once for each remote node) in bf16, there and back
    dispatch_ms     from the call until the rows of all ranks are here
    combine_ms      from the call until the sums are here
    card_ms         the planner's, of both calls: the card's latency and its time for these bytes, where those are known
    to_card         both calls / card_ms. What is above 1 is time of CPUs
    cpu_ms          both calls over the paced wire without a pace, taking turns with the others: time of CPUs alone
    to_model        both calls / (card_ms + cpu_ms), as the planner adds what a call costs beside its bytes

A rank that hangs or dies is named, with the wait that it ended.
"""

import argparse
import os
import sys
from dataclasses import replace
from pathlib import Path

from benchmarks.ep.internode_model import InternodeCase, card_leg, fastest_card_GBps
from benchmarks.ep.internode_needs import Need, nvshmem_needs
from benchmarks.ep.wire_ranks import WireRanks
from benchmarks.tools.report import BenchmarkReport
from eprt import env
from eprt.cluster.crossings import ExpertChoice
from eprt.ep.wire.meeting import is_loopback, parse_address
from eprt.ep.wire.options import WireOptions

NUM_RANKS = 0
NEEDS = "starts its own ranks; more hosts by --nnodes"
ON_REQUEST = "compares with a model, on a quiet machine"

PACED = "paced:gbps=0.1,latency_us=50"  # slow enough that two cores keep up with it
_RANK = "benchmarks.ep.internode_rank"
_GRACE_S = 30.0  # beyond the deadline of waits, until a rank has said what it waited for


def main(argv: list[str] | None = None) -> int:
    """0 where all was measured, 1 where a rank was lost or hung, 2 where it cannot be measured here."""
    arguments = _parser().parse_args(argv)
    try:
        wire = _wire(arguments)
        return _measure(arguments, wire)
    except (ValueError, OSError) as error:
        print(f"bench_internode: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bench_internode", description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("--wire", default="paced", help=f"nvshmem, tcp or paced, with settings as in docs/wire.md; paced: {PACED}")
    add("--nodes", type=int, nargs="+", default=[2, 4], metavar="N", help="virtual nodes, on one host")
    add("--ranks-per-node", type=int, default=1, metavar="N", help="of each node; on several hosts, of each host")
    add("--tokens", type=int, nargs="+", default=[32, 128], metavar="T", help="of each rank")
    add("--hidden", type=int, default=7168)
    add("--experts", type=int, default=256)
    add("--top-k", type=int, default=8)
    add("--calls", type=int, default=15, help="measured calls of each case")
    add(
        "--nic",
        type=float,
        metavar="GBps",
        help="of a host's card, for the model; default: the fastest one of this host",
    )
    add("--nnodes", type=int, default=1, help="hosts; give the same command on each, with its --node-rank")
    add("--node-rank", type=int, default=0)
    add("--dist-init-addr", metavar="HOST:PORT", help="of host 0; off loopback EPRT_GROUP_KEY must be set")
    add("--timeout-s", type=float, default=30.0, metavar="S", help="after which a rank that does not answer has hung")
    add("--json", metavar="FOLDER", help="writes internode_WIRE.json there, too")
    return parser


def _wire(arguments: argparse.Namespace) -> WireOptions:
    """ValueError with one line for what cannot be measured here."""
    kind = arguments.wire.partition(":")[0]
    if kind == "nvshmem":
        raise ValueError(_why_not_nvshmem(nvshmem_needs()))
    wire = WireOptions.from_text(_text(arguments))
    if arguments.nnodes > 1 and kind == "paced":
        raise ValueError("--wire paced is memory of one host; leave out --nnodes, or write --wire tcp")
    if not 0 <= arguments.node_rank < arguments.nnodes:
        raise ValueError(f"--node-rank {arguments.node_rank}: must be in 0..{arguments.nnodes - 1}")
    if arguments.nnodes > 1 and not arguments.dist_init_addr:
        raise ValueError("--nnodes: give --dist-init-addr HOST:PORT, an address of host 0")
    for name in ("ranks_per_node", "hidden", "experts", "top_k", "calls"):
        if getattr(arguments, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(arguments, name)}: must be at least 1")
    for nodes in _node_counts(arguments):
        if nodes < 2 or arguments.experts % (nodes * arguments.ranks_per_node):
            ranks = nodes * arguments.ranks_per_node
            raise ValueError(
                f"--nodes {nodes}: at least 2, and --experts {arguments.experts} a multiple of {ranks} ranks"
            )
    if arguments.top_k > arguments.experts or min(arguments.tokens) < 1:
        raise ValueError(f"--top-k {arguments.top_k}, --tokens {arguments.tokens}: at most --experts, and at least 1")
    return wire


def _text(arguments: argparse.Namespace) -> str:
    return PACED if arguments.wire == "paced" else arguments.wire


def _why_not_nvshmem(needs: list[Need]) -> str:
    missing = [need for need in needs if not need.found]
    for need in needs:
        print(f"{need.name:36} {need.found or 'missing'}")
    if missing:
        return f"--wire nvshmem: {missing[0].name} is missing: {missing[0].remedy}; tcp and paced need none of it"
    return "--wire nvshmem: all is there; this program measures CPU ranks only, so measure --wire tcp, or serve on GPUs"


def _node_counts(arguments: argparse.Namespace) -> list[int]:
    return [arguments.nnodes] if arguments.nnodes > 1 else arguments.nodes


def _measure(arguments: argparse.Namespace, wire: WireOptions) -> int:
    nic = arguments.nic
    if nic is None and arguments.nnodes > 1:
        nic = fastest_card_GBps()
    leg = card_leg(wire, nic)
    config = {"wire": _text(arguments), "hidden": arguments.hidden}
    config |= {"experts": arguments.experts, "top_k": arguments.top_k, "ranks_per_node": arguments.ranks_per_node}
    report = BenchmarkReport(f"internode_{wire.kind}", config)
    for nodes in _node_counts(arguments):
        cases = run_nodes(arguments, wire, nodes)
        if isinstance(cases, str):
            print(f"bench_internode: {nodes} nodes: {cases}", file=sys.stderr)
            return 1
        for tokens, measured in zip(arguments.tokens, cases):
            gate = ExpertChoice(arguments.experts, arguments.top_k)
            case = InternodeCase(nodes, gate, tokens, arguments.hidden)
            columns = {"model_kB": 2 * case.bytes_each_way / 1e3, **measured}
            if leg is not None:
                columns |= beside_model(measured, 2 * leg.us(case.bytes_each_way) / 1e3)
            report.add_row(nodes=nodes, tokens=tokens, **columns)
    if arguments.node_rank == 0:
        print_report(report, arguments.json)
        if leg is None:
            print("no card's speed is known, so the planner predicts nothing; give --nic")
    return 0


def beside_model(measured: dict[str, float], card_ms: float) -> dict[str, float]:
    both_ms = measured["dispatch_ms"] + measured["combine_ms"]
    columns = {"card_ms": card_ms, "to_card": both_ms / card_ms}
    if "cpu_ms" in measured:
        columns["to_model"] = both_ms / (card_ms + measured["cpu_ms"])
    return columns


def print_report(report: BenchmarkReport, folder: str | None) -> None:
    from benchmarks.tools.report import table

    print(f"\n{report.name}  {' '.join(f'{k}={v}' for k, v in report.config.items())}")
    print(table(report.rows), flush=True)
    if folder is not None:
        print(report.write(Path(folder)))


def run_nodes(arguments: argparse.Namespace, wire: WireOptions, nodes: int) -> list[dict[str, float]] | str:
    """Each case's columns, which all ranks know; or in one line which rank was lost or hung, and in which wait."""
    per_node = arguments.ranks_per_node
    address = arguments.dist_init_addr
    if address is not None and not is_loopback(parse_address(address)[0]) and not env.get("EPRT_GROUP_KEY"):
        raise ValueError(f"whoever reaches {address} could join: set EPRT_GROUP_KEY to the same secret on all hosts")
    wires = [_text(arguments)]
    if wire.kind == "paced" and wire.gbps:
        wires.append(f"paced:threads={wire.threads},ring={wire.ring},arena_kib={wire.arena_kib}")
    first = arguments.node_rank * per_node
    ranks = WireRanks(_RANK, nodes, per_node, wires, arguments.timeout_s, arguments.timeout_s + _GRACE_S)
    if arguments.nnodes > 1:
        ranks = replace(ranks, meeting=address, here=range(first, first + per_node))
    return ranks.run({name: vars(arguments)[name] for name in ("tokens", "hidden", "experts", "top_k", "calls")})


if __name__ == "__main__":
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    sys.exit(main())
