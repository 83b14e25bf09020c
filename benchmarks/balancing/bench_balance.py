"""The planner beside DeepSeek's EPLB: time, balance, bytes moved and traffic, on synthetic and on recorded load.

EPLB is one Python file of github.com/deepseek-ai/EPLB, which is not part of this repository:

    git clone https://github.com/deepseek-ai/EPLB eplb
    eprt bench bench_balance -- --eplb eplb/eplb.py

With it, the maps of both are compared first and EPLB is timed. Without it, placements "of EPLB" are those of
rebalance_experts, and the times go to balance_plans_without_eplb, so that EPLB's stay. Targets and misses are printed.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from eprt.balancer import read_load

from benchmarks.balancing import drift, eplb_peer, plans, targets, traffic
from benchmarks.balancing.clusters import EXPERTS, LAYERS
from benchmarks.balancing.record_demo import TRACE
from benchmarks.tools.report import BenchmarkReport

NUM_RANKS = 0
NEEDS = "EPLB beside it with -- --eplb FILE"
PARTS = ("parity", "plans", "drift", "traffic")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--eplb", type=Path, metavar="FILE", help="DeepSeek's eplb.py")
    parser.add_argument("--samples", type=int, default=15, help="of each time")
    parser.add_argument("--trace", type=Path, default=TRACE, help="recorded load with routing traces")
    parser.add_argument("--parts", type=lambda text: text.split(","), default=list(PARTS), help="default: all of them")
    arguments = parser.parse_args(argv)
    shape = {"layers": LAYERS, "experts": EXPERTS, "cores": len(os.sched_getaffinity(0))}
    eplb = None if arguments.eplb is None else eplb_peer.load(arguments.eplb)
    recorded = read_load(arguments.trace)
    reports = {part: BenchmarkReport(f"balance_{part}", shape) for part in PARTS}
    if eplb is not None and "parity" in arguments.parts:
        plans.check_parity(eplb, reports["parity"])
    if eplb is None:
        reports["plans"].name += "_without_eplb"
    if "plans" in arguments.parts:
        plans.bench_plans(eplb, reports["plans"], arguments.samples)
    if "drift" in arguments.parts:
        drift.bench_drifts(reports["drift"], recorded)
    if "traffic" in arguments.parts:
        traffic.bench_traffics(reports["traffic"], recorded)
    for report in reports.values():
        if report.rows:
            report.finish()
    missed = list(targets.misses(reports["plans"], reports["drift"], reports["traffic"]))
    print("\n".join(missed) if missed else "every target is met")
    return 0


if __name__ == "__main__":
    sys.exit(main())
