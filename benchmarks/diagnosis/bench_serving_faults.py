"""Fault suite on simulated serving jobs (docs/diagnosis-noise.md): what is found, what is blamed for nothing.

The jobs' noise was specified before its author read the detector; families and seeds that nothing was tuned on are
counted apart.

    python -m benchmarks.diagnosis.bench_serving_faults                      # unseen seeds; 20 minutes of a core
    python -m benchmarks.diagnosis.bench_serving_faults --tuning --seeds 20  # seen seeds, to work with
"""

import argparse
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import repeat
from typing import Any

import numpy as np
from eprt.diagnostics import Finding, Report

from benchmarks.diagnosis.serving_job import ServingFault, ServingJob, play_records
from benchmarks.diagnosis.serving_noise import SEEN, UNSEEN, UNSEEN_SEEDS
from benchmarks.tools.report import BenchmarkReport, table

NUM_RANKS = 0
ON_REQUEST = "takes ten minutes of two cores"

RANKS, FACTORS = (4, 8, 16, 32), (1.5, 2.0, 3.0)
PLACES = ("column comp", "column comm", "row", "point")
WIDE = {"job": 2.0, "tier": 4.0, "node comp": 2.0, "node comm": 2.0, "path": 3.0}  # kind -> factor
WIDE_RANKS = (8, 16, 32, 64)
NUM_WINDOWS, ONSET = 12, 4
# Clean jobs of nodes in two racks, between which links take twice as long: kind -> (nodes, of them in the first rack)
RACKS = {"racks 3+1": (4, 3), "racks 6+2": (8, 6)}
RACKS_RANKS = 16
OFTEN, TIMES = ("clean", "early", *RACKS), 6  # of these as many times the seeds: their findings are rare


@dataclass(frozen=True)
class ServingCase:
    """Jobs that differ only by their seed."""

    family: str
    num_ranks: int
    kind: str  # of the fault; "burst ..." for one window; "clean", or one of RACKS
    factor: float = 1.0

    def job(self, seed: int) -> ServingJob:
        rng = np.random.default_rng([seed, self.num_ranks, 7])
        num, kind = self.num_ranks, self.kind.removeprefix("burst ")
        wide = kind in WIDE
        per_node = max(2, num // 4) if wide else (max(2, num // 2) if seed % 2 else num)
        nodes = tuple((np.arange(num) // per_node).tolist())
        job = ServingJob(num, self.family, seed, NUM_WINDOWS, nodes)
        if kind in RACKS:
            num_nodes, first = RACKS[kind]
            far = tuple((a, b) for a in range(first) for b in range(first, num_nodes))
            return replace(job, node_of_rank=tuple((np.arange(num) * num_nodes // num).tolist()), slow_pairs=far)
        if kind == "clean":
            return job
        windows = ONSET, NUM_WINDOWS - 1
        if self.kind.startswith("burst "):
            window = int(rng.integers(ONSET, NUM_WINDOWS - 1))
            windows = window, window
        places = rng.permutation(nodes[-1] + 1 if wide else num).tolist()
        size = {"point": 2, "path": 2, "job": 0, "tier": 0}.get(kind, 1)
        factor = float(rng.uniform(0.5, 0.7)) if kind == "early" else self.factor
        return replace(job, fault=ServingFault(kind, factor, tuple(places[:size]), windows))


def is_named(fault: ServingFault, finding: Finding) -> bool:
    """A slow receiver is late itself, so everybody waits for it: its column, as the network, is right."""
    kind = fault.kind.split()[0]
    if kind == "row" and finding.kind == "column" and finding.cause == "comm":
        return finding.rank == fault.place[0]
    if finding.kind != kind:
        return False
    match kind:
        case "column" | "row":
            return finding.rank == fault.place[0]
        case "point":
            return (finding.src, finding.dst) == fault.place
        case "node" | "path":
            return sorted(finding.nodes) == sorted(fault.place)
    return True


def is_lasting(finding: Finding) -> bool:
    return finding.last_window > finding.first_window


def tally(case: ServingCase, first: int, most: int) -> dict[str, Any]:
    """One row of the table. most: seeds of up to 16 ranks; larger jobs, which take longer, have fewer."""
    seeds = range(first, first + max(4, most * 16 // max(16, case.num_ranks)))
    named = right_cause = others = blamed = alone = 0
    for seed in seeds:
        job = case.job(seed)
        findings = Report.of_records(play_records(job)).findings
        fault = job.fault
        hits = [f for f in findings if fault is not None and is_named(fault, f)]
        if case.kind.startswith("burst "):
            hits = [f for f in hits if not is_lasting(f)]
            blamed += any(is_lasting(f) for f in findings)
        named += bool(hits)
        others += len(findings) - len(hits)
        alone += bool(hits) and len(findings) == 1
        if fault is not None and fault.kind.startswith("column"):
            right_cause += any(f.cause == fault.kind.split()[1] for f in hits)
        if case.kind == "early":
            blamed += bool(findings)
    row = {"family": case.family, "ranks": case.num_ranks, "fault": case.kind, "factor": case.factor}
    return row | {
        "jobs": len(seeds),
        "named": named,
        "cause right": right_cause,
        "named alone": alone,
        "others": others,
        "blamed": blamed,
        "windows": len(seeds) * NUM_WINDOWS,
    }


def cases(families: Sequence[str], ranks: Sequence[int], kinds: Sequence[str]) -> list[ServingCase]:
    out = []
    for family in families:
        for num in ranks:
            for kind in kinds:
                if kind in WIDE:
                    if num in WIDE_RANKS:
                        out.append(ServingCase(family, num, kind, WIDE[kind]))
                elif kind in RACKS:
                    if num == RACKS_RANKS:
                        out.append(ServingCase(family, num, kind))
                elif kind in PLACES:
                    out += [ServingCase(family, num, kind, factor) for factor in FACTORS]
                else:
                    out.append(ServingCase(family, num, kind, 5.0 if kind.startswith("burst ") else 1.0))
    return out


KINDS = (*PLACES, *WIDE, "early", "burst column comp", "burst row", "burst point", "clean", *RACKS)


def summary(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """By fault, factor and number of ranks; seen and unseen families apart."""
    groups: dict[tuple, list[dict[str, Any]]] = {}
    for row in rows:
        size = "4" if row["ranks"] == 4 else "8-64"
        which = "seen" if row["family"] in SEEN else "unseen"
        groups.setdefault((row["fault"], row["factor"], size, which), []).append(row)
    out = []
    for (fault, factor, size, which), members in sorted(groups.items()):
        sums = {name: sum(m[name] for m in members) for name in ("jobs", "named", "cause right", "others", "blamed")}
        alone, windows = sum(m["named alone"] for m in members), sum(m["windows"] for m in members)
        out.append(
            {
                "fault": fault,
                "factor": factor,
                "ranks": size,
                "families": which,
                "jobs": sums["jobs"],
                "recall": round(sums["named"] / sums["jobs"], 3),
                "worst": round(min(m["named"] / m["jobs"] for m in members), 3),
                "alone": round(alone / sums["jobs"], 3),
                "cause right": round(sums["cause right"] / max(1, sums["named"]), 3),
                "others per 1000 windows": round(1000 * sums["others"] / windows, 2),
                "blamed": sums["blamed"],
            }
        )
    return out


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _arguments(argv)
    first = 0 if arguments.tuning else arguments.first_seed
    families = arguments.families or (SEEN if arguments.tuning else (*SEEN, *UNSEEN))
    report = BenchmarkReport(
        "serving_faults_tuning" if arguments.tuning else "serving_faults",
        {
            "windows": NUM_WINDOWS,
            "onset": ONSET,
            "seeds": arguments.seeds,
            "seeds_of_clean_and_early": TIMES * arguments.seeds,
            "first_seed": first,
        },
    )
    work = cases(families, arguments.ranks, arguments.kinds)
    with ProcessPoolExecutor(arguments.processes) as pool:
        most = [arguments.seeds * (TIMES if case.kind in OFTEN else 1) for case in work]
        report.rows += pool.map(tally, work, repeat(first), most)
    if not arguments.tuning:
        report.finish()
    print(table(summary(report.rows)))
    return 0


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.diagnosis.bench_serving_faults")

    def of(kind):
        return lambda text: tuple(kind(word) for word in text.split(","))

    parser.add_argument("--seeds", type=int, default=8, help="jobs of each case of up to 16 ranks")
    parser.add_argument("--first-seed", type=int, default=UNSEEN_SEEDS, help="one that nobody has looked at")
    parser.add_argument("--tuning", action="store_true", help="seen families and seeds, and no result file")
    parser.add_argument("--families", type=of(str))
    parser.add_argument("--ranks", type=of(int), default=RANKS)
    parser.add_argument("--kinds", type=of(str), default=KINDS)
    parser.add_argument("--processes", type=int, default=2)
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
