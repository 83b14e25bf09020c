"""Plans that know which experts are chosen together: bytes between nodes, and time of a step, served over a paced wire.

    python -m benchmarks.balancing.bench_affinity

Four CPU ranks on 2 and on 4 virtual nodes serve the demo model: every rank always has REQUESTS questions under way, of
topics of which the n-th is asked 1 / n times as often as the first. Two plans are made from the load and the routing
that the ranks have counted of other questions: `balance` from the load alone, and `affinity` with the routing, too. On
2 nodes `balance` keeps the gate's groups together, as EPLB does; on 4 a rank has more slots than a group has experts,
so it cannot. Both serve the same questions in turns, over wires of each pace; the server's own migration has moved the
experts. Windows are of STEPS steps; ratios are affinity / balance, of windows with the same questions: their median and
tenths.

    _kB          counted: bytes that a rank gives to the wire in a step, the mean; headers included
    _step_ms     a step of the slowest rank
    _card_ms     that a card of this pace needs for these bytes: what affinity can save at most
    _skew        busiest rank over the mean, _copies: of a token to other nodes, in a layer; both as the planner counts
                 them on questions that it has not seen; start: of the placement before any plan, groups in order

A token of the demo model is a 28th of DeepSeek-V3's, and a step on CPUs takes milliseconds: at the pace of a network
card its bytes take a thousandth of a step, and time tells nothing. SLOW is a pace at which the wire has a share of the
step, as in a cluster. What it saves there is no figure of a cluster.
"""

import argparse
import sys
from pathlib import Path

from benchmarks.ep.wire_ranks import WireRanks
from benchmarks.tools.report import RESULTS, BenchmarkReport

NUM_RANKS = 0
NEEDS = "starts its own ranks"

RANKS, NODES = 4, (2, 4)
CARDS_GBPS, SLOW_GBPS = (25.0, 12.0), 0.02
REQUESTS, REDUNDANT = 16, 8
SEEN_STEPS, STEPS, TURNS = 160, 16, 6
_LATENCY_US = 3.0
_RANK = "benchmarks.balancing.affinity_rank"


def main(argv: list[str] | None = None) -> int:
    """0 where all was measured, 1 where a rank was lost or hung."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--turns", type=int, default=TURNS)
    parser.add_argument("--paces", type=float, nargs="+", default=[*CARDS_GBPS, SLOW_GBPS], metavar="GBps")
    parser.add_argument("--nodes", type=int, nargs="+", default=list(NODES), choices=NODES, metavar="N")
    parser.add_argument("--json", type=Path, default=RESULTS, metavar="FOLDER", help="of the result's file")
    arguments = parser.parse_args(argv)
    case = {"requests": REQUESTS, "redundant": REDUNDANT, "seen_steps": SEEN_STEPS, "steps": STEPS}
    config = {"model": "demo", "ranks": RANKS, **case, "turns": arguments.turns, "latency_us": _LATENCY_US}
    report = BenchmarkReport("affinity", config)
    wires = [f"paced:gbps={gbps:g},latency_us={_LATENCY_US:g}" for gbps in arguments.paces]
    for nodes in arguments.nodes:
        ranks = WireRanks(_RANK, nodes, RANKS // nodes, wires, timeout_s=60.0, patience_s=90.0)
        rows = ranks.run({**case, "turns": arguments.turns})
        if isinstance(rows, str):
            print(f"bench_affinity: {nodes} nodes: {rows}", file=sys.stderr)
            return 1
        for gbps, row in zip(arguments.paces, rows):
            cards = {f"{name}_card_ms": row[f"{name}_kB"] / gbps / 1e3 for name in ("balance", "affinity")}
            report.add_row(nodes=nodes, gbps=gbps, **row, **cards)
    report.finish(arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
