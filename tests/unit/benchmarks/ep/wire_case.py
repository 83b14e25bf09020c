"""Ranks of test_wire_ranks.py: one of them stops, or is killed, before the others start."""

import os
import signal
import sys

from benchmarks.ep.wire_rank import run_rank


def measure(groups, case):
    (group,) = groups
    group.start_together()
    if group.rank == case["culprit"]:
        os.kill(os.getpid(), signal.Signals[case["signal"]])
    group.start_together()
    return [{"ranks": group.size}]


if __name__ == "__main__":
    sys.exit(run_rank(measure))
