"""Fault suite: planted faults and clean runs, how many are found, where, why and how soon; no torch, no ranks.

Jobs of 12 windows from eprt.diagnostics.synthetic; a fault lasts from window 4 to the end. The detector was tuned on
lognormal noise only; gamma, heavy-tailed and autocorrelated noise and played arrivals are there to keep it honest.

    python -m benchmarks.bench_faults --seeds 200 --noises lognormal,gamma --ranks 8,16
"""

import argparse
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from eprt.diagnostics.analysis import Finding, find
from eprt.diagnostics.synthetic import FAULT_KINDS, NOISES, Fault, Job, generate

from benchmarks.report import Report

NUM_RANKS = 0
RANKS, FACTORS = (4, 8, 16, 32, 64), (1.2, 1.5, 2.0, 3.0, 5.0)
ALL_NOISES = (*NOISES, "arrivals")
TARGET_FACTOR = {"column": 2.0, "row": 2.0, "point": 3.0}
NUM_WINDOWS, ONSET = 12, 4
CLEAN = {
    "plain": {},
    "batch skew": {"batch_skew": 0.25},
    "idle ranks": {"idle": (1, 2)},
    "migration": {"migration": 5},
}
PAIRS = (
    (("column", "comp"), ("column", "comp")),
    (("point", "comm"), ("point", "comm")),
    (("column", "comp"), ("point", "comm")),
)
_DATED_SEEDS = 40  # of each case are analysed window by window, as they come


@dataclass(frozen=True)
class Case:
    """Jobs that differ by their seed only. faults: (kind, cause) of each."""

    noise: str
    num_ranks: int
    faults: tuple[tuple[str, str], ...]
    factor: float

    def job(self, seed: int) -> Job:
        rng = np.random.default_rng([seed, self.num_ranks, len(self.faults)])
        ranks = rng.permutation(self.num_ranks).tolist()
        faults = []
        for kind, cause in self.faults:
            place = {"src": ranks.pop(), "dst": ranks.pop()} if kind == "point" else {"rank": ranks.pop()}
            faults.append(Fault(kind, factor=self.factor, cause=cause, windows=(ONSET, NUM_WINDOWS - 1), **place))
        return job_of(self.noise, self.num_ranks, seed, tuple(faults))


def job_of(noise: str, num_ranks: int, seed: int, faults: tuple[Fault, ...] = (), **burden: Any) -> Job:
    nodes = max(4, num_ranks // 2) if seed % 2 else None  # every other job on two nodes
    return Job(num_ranks, NUM_WINDOWS, seed, noise, ranks_per_node=nodes, faults=faults, **burden)


@dataclass
class Tally:
    """What came out of one case. causes: (planted, found) -> count. delays: windows from onset to the first alarm."""

    jobs: int = 0
    planted: int = 0
    found: int = 0
    wrong: int = 0
    first: int = 0
    causes: Counter = field(default_factory=Counter)
    delays: list[int] = field(default_factory=list)

    def add(self, faults: Sequence[Fault], findings: Sequence[Finding]) -> None:
        places = {place(fault): fault.cause for fault in faults}
        hits = {place(finding): finding.cause for finding in findings if place(finding) in places}
        self.jobs, self.planted, self.found = self.jobs + 1, self.planted + len(faults), self.found + len(hits)
        self.wrong += sum(place(finding) not in places for finding in findings)
        self.first += bool(findings) and place(findings[0]) in places
        self.causes.update((places[at], cause) for at, cause in hits.items())

    def columns(self) -> dict[str, Any]:
        right = sum(count for (planted, found), count in self.causes.items() if planted == found)
        return {
            "jobs": self.jobs,
            "precision": share(self.found, self.found + self.wrong),
            "recall": share(self.found, self.planted),
            "top1": share(self.first, self.jobs),
            "cause_right": share(right, self.found),
            "confusion": " ".join(f"{a}>{b}:{n}" for (a, b), n in sorted(self.causes.items()) if a != b) or "-",
            "windows_to_detect": float(np.median(self.delays)) if self.delays else "",
        }


def place(at: Fault | Finding) -> tuple:
    return at.kind, at.rank, at.src, at.dst


def share(part: int, whole: int) -> float | str:
    return round(part / whole, 4) if whole else ""


def run_case(case: Case, num_seeds: int) -> Tally:
    tally = Tally()
    for seed in range(num_seeds):
        job = case.job(seed)
        matrices = generate(job)
        findings = find(matrices)[1]
        tally.add(job.faults, findings)
        if seed < _DATED_SEEDS and len(job.faults) == 1 and any(place(f) == place(job.faults[0]) for f in findings):
            tally.delays.append(delay(matrices, job.faults[0]))
    return tally


def delay(matrices, fault: Fault) -> int:
    """Windows that had to be seen since the onset until the fault was reported."""
    for num in range(ONSET + 1, NUM_WINDOWS):
        if any(place(finding) == place(fault) for finding in find(matrices.first(num))[1]):
            return num - ONSET
    return NUM_WINDOWS - ONSET


def cases(noises: Sequence[str], ranks: Sequence[int], factors: Sequence[float]) -> Iterator[Case]:
    for noise in noises:
        for num_ranks in ranks:
            for kind, cause in FAULT_KINDS:
                if noise == "arrivals" and kind == "row":
                    continue  # a slow receiver is late itself: it is the column that shows, as column comm does here
                for factor in factors if noise == "lognormal" else (TARGET_FACTOR[kind],):
                    yield Case(noise, num_ranks, ((kind, cause),), factor)
            if noise == "lognormal" and num_ranks >= 8:
                for pair in PAIRS:
                    yield Case(noise, num_ranks, pair, 3.0)


def run_clean(noise: str, num_ranks: int, burden: str, num_seeds: int) -> tuple[int, Counter]:
    """Clean windows looked at, and false alarms by kind."""
    alarms: Counter = Counter()
    for seed in range(10_000, 10_000 + num_seeds):
        findings = find(generate(job_of(noise, num_ranks, seed, **CLEAN[burden])))[1]
        alarms.update(finding.kind for finding in findings)
    return num_seeds * NUM_WINDOWS, alarms


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _arguments(argv)
    shape = {"windows": NUM_WINDOWS, "onset": ONSET, "seeds": arguments.seeds, "cv": Job.cv}
    planted = Report("faults", shape)
    for case in cases(arguments.noises, arguments.ranks, arguments.factors):
        kinds = "+".join(f"{kind} {cause}" for kind, cause in case.faults)
        tally = run_case(case, arguments.seeds)
        planted.row(noise=case.noise, ranks=case.num_ranks, fault=kinds, factor=case.factor, **tally.columns())
    clean = Report("faults_clean", shape)
    for noise in arguments.noises:
        for num_ranks in arguments.ranks:
            for burden in CLEAN:
                windows, alarms = run_clean(noise, num_ranks, burden, arguments.seeds)
                total = sum(alarms.values())
                clean.row(noise=noise, ranks=num_ranks, burden=burden, windows=windows, **_by_kind(alarms),
                          per_1000_windows=round(1000 * total / windows, 2))  # fmt: skip
    planted.finish()
    clean.finish()
    missed = list(misses(planted.rows, clean.rows))
    print("\n".join(missed) if missed else "every target is met")
    return 0


def misses(planted: Sequence[dict[str, Any]], clean: Sequence[dict[str, Any]]) -> Iterator[str]:
    """What falls short of the targets (docs/diagnosis.md), for 8 ranks and more; clean runs are summed over burdens."""
    for row in planted:
        kind, single = row["fault"].split()[0], "+" not in row["fault"]
        if row["ranks"] < 8 or not single or row["factor"] != TARGET_FACTOR[kind]:
            continue
        wanted = {"precision": 0.98 if kind != "point" else 0.0, "recall": 0.95 if kind != "point" else 0.9}
        for name, least in {**wanted, "cause_right": 0.95}.items():
            if row[name] == "" or row[name] < least:
                yield f"below target: {row['noise']} {row['ranks']} ranks {row['fault']}: {name} {row[name]} < {least}"
    for noise in dict.fromkeys(row["noise"] for row in clean):
        rows = [row for row in clean if row["noise"] == noise and row["ranks"] >= 8]
        alarms = sum(row["column"] + row["row"] + row["point"] for row in rows)
        rate = 1000 * alarms / max(1, sum(row["windows"] for row in rows))
        if rate > 1:
            yield f"above target: {noise}: {rate:.2f} false alarms per 1000 clean windows"


def _by_kind(alarms: Counter) -> dict[str, int]:
    return {kind: alarms[kind] for kind in ("column", "row", "point")}


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_faults")

    def of(kind):
        return lambda text: tuple(kind(word) for word in text.split(","))

    parser.add_argument("--seeds", type=int, default=200, help="jobs of each case")
    parser.add_argument("--noises", type=of(str), default=ALL_NOISES)
    parser.add_argument("--ranks", type=of(int), default=RANKS)
    parser.add_argument("--factors", type=of(float), default=FACTORS)
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
