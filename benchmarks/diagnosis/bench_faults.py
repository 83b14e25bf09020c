"""Fault suite: planted faults and clean runs, how many are found, where, why and how soon; no torch, no ranks.

Jobs of 12 windows from eprt.diagnostics.synthetic; a fault lasts from window 4 to the end, and its factor is how many
times as long the waits at its place become. The detector was tuned on lognormal noise and on the models of
fault_noises.py, with seeds below a million; gamma, heavy-tailed and autocorrelated noise and played arrivals are there
to keep it honest. Two simpler methods see the same jobs: the plain z-score, and the ratio to the mean of
ratio_to_mean.py. Tables of the results: python -m benchmarks.diagnosis.fault_tables.

    python -m benchmarks.diagnosis.bench_faults                # everything: half an hour of a core
    python -m benchmarks.diagnosis.bench_faults --add --noises gamma --ranks 8,16    # a part; other rows are kept
    python -m benchmarks.diagnosis.bench_faults --tuning       # what thresholds are chosen by
"""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from eprt.diagnostics.detect.analysis import Finding, find_faults
from eprt.diagnostics.synthetic import FAULT_KINDS, NOISES, PlantedFault, SyntheticJob, generate

from benchmarks.diagnosis import ratio_to_mean
from benchmarks.diagnosis.fault_noises import TUNING
from benchmarks.diagnosis.fault_tables import TARGET_FACTOR, clean_summary, misses, share, shown, summary
from benchmarks.tools.report import RESULTS, BenchmarkReport, table

NUM_RANKS = 0
ON_REQUEST = "takes half an hour of two cores"

FIRST_SEED = 1_000_000  # of noise that the detector was tuned on: 0
RANKS, FACTORS = (4, 8, 16, 32, 64), (1.2, 1.5, 2.0, 3.0, 5.0)
ALL_NOISES = (*(noise for noise in NOISES if noise not in TUNING), "arrivals")
NUM_WINDOWS, ONSET = 12, 4
CLEAN = {
    "plain": {},
    "batch skew": {"batch_skew": 0.25},
    "idle ranks": {"idle": (1, 2)},
    "migration": {"migration": 5},
    "all of these": {"batch_skew": 0.25, "idle": (1, 2), "migration": 5},
}
PAIRS = (
    (("column", "comp"), ("column", "comp")),
    (("point", "comm"), ("point", "comm")),
    (("column", "comp"), ("point", "comm")),
)
_DATED_SEEDS = 3  # of each case are analysed window by window, as they come


@dataclass(frozen=True)
class FaultCase:
    """Jobs that differ only by their seed."""

    noise: str
    num_ranks: int
    faults: tuple[tuple[str, str], ...]  # (kind, cause) of each
    factor: float

    def job(self, seed: int) -> SyntheticJob:
        rng = np.random.default_rng([seed, self.num_ranks, len(self.faults)])
        ranks = rng.permutation(self.num_ranks).tolist()
        faults = []
        for kind, cause in self.faults:
            place = {"src": ranks.pop(), "dst": ranks.pop()} if kind == "point" else {"rank": ranks.pop()}
            windows = ONSET, NUM_WINDOWS - 1
            faults.append(PlantedFault(kind, factor=self.factor, cause=cause, windows=windows, **place))
        return job_of(self.noise, self.num_ranks, seed, tuple(faults))


def job_of(noise: str, num_ranks: int, seed: int, faults: tuple[PlantedFault, ...] = (), **burden: Any) -> SyntheticJob:
    nodes = max(4, num_ranks // 2) if seed % 2 else None  # every other job on two nodes
    return SyntheticJob(num_ranks, NUM_WINDOWS, seed, noise, ranks_per_node=nodes, faults=faults, **burden)


@dataclass
class Tally:
    """What came out of one case."""

    jobs: int = 0
    planted: int = 0
    found: int = 0
    wrong: int = 0
    first: int = 0
    causes: Counter = field(default_factory=Counter)  # (planted, found) -> count
    delays: list[int] = field(default_factory=list)  # windows from onset to the first alarm

    def add(self, faults: Sequence[PlantedFault], places: Sequence[tuple]) -> None:
        """places: of the findings, the most certain first."""
        planted = {place(fault) for fault in faults}
        hits = planted & set(places)
        self.jobs, self.planted, self.found = self.jobs + 1, self.planted + len(faults), self.found + len(hits)
        self.wrong += sum(at not in planted for at in places)
        self.first += bool(places) and places[0] in planted

    def add_causes(self, faults: Sequence[PlantedFault], findings: Sequence[Finding]) -> None:
        causes = {place(fault): fault.cause for fault in faults}
        self.causes.update((causes[place(f)], f.cause) for f in findings if place(f) in causes)

    def __add__(self, other: "Tally") -> "Tally":
        return Tally(
            self.jobs + other.jobs,
            self.planted + other.planted,
            self.found + other.found,
            self.wrong + other.wrong,
            self.first + other.first,
            self.causes + other.causes,
            self.delays + other.delays,
        )

    @property
    def precision(self) -> float:
        return share(self.found, self.found + self.wrong)

    @property
    def recall(self) -> float:
        return share(self.found, self.planted)

    @property
    def cause_right(self) -> float:
        right = sum(count for (planted, found), count in self.causes.items() if planted == found)
        return share(right, self.causes.total())

    def columns(self) -> dict[str, Any]:
        return {
            "jobs": self.jobs,
            "planted": self.planted,
            "found": self.found,
            "wrong": self.wrong,
            "precision": shown(self.precision),
            "recall": shown(self.recall),
            "top1": shown(share(self.first, self.jobs)),
            "cause_right": shown(self.cause_right),
            "confusion": " ".join(f"{a}>{b}:{n}" for (a, b), n in sorted(self.causes.items()) if a != b) or "-",
            "windows_to_detect": float(np.median(self.delays)) if self.delays else "",
        }


Tallies = dict[str, Tally]  # by method
METHODS = ("robust", "zscore", "ratio")


def place(at: PlantedFault | Finding) -> tuple:
    return at.kind, at.rank, at.src, at.dst


def seeds(noise: str, num: int) -> range:
    first = 0 if noise in TUNING else FIRST_SEED
    return range(first, first + num)


def run_case(
    case: FaultCase, num_seeds: int, methods: Sequence[str] = METHODS, dated_seeds: int = _DATED_SEEDS
) -> Tallies:
    tallies = {method: Tally() for method in methods}
    for k, seed in enumerate(seeds(case.noise, num_seeds)):
        job = case.job(seed)
        matrices = generate(job)
        for method, tally in tallies.items():
            if method == "ratio":
                tally.add(job.faults, ratio_to_mean.places(matrices.wait_us_WNN))
                continue
            findings = find_faults(matrices, method)[1]
            places = [place(finding) for finding in findings]
            tally.add(job.faults, places)
            tally.add_causes(job.faults, findings)
            dated = method == "robust" and k < dated_seeds and len(job.faults) == 1
            if dated and place(job.faults[0]) in places:
                tally.delays.append(delay(matrices, job.faults[0]))
    return tallies


def delay(matrices, fault: PlantedFault) -> int:
    """Windows that had to be seen since the onset until the fault was reported."""
    for num in range(ONSET + 1, NUM_WINDOWS):
        if any(place(finding) == place(fault) for finding in find_faults(matrices.first(num))[1]):
            return num - ONSET
    return NUM_WINDOWS - ONSET


def cases(noises: Sequence[str], ranks: Sequence[int], factors: Sequence[float]) -> Iterator[FaultCase]:
    for noise in noises:
        for num_ranks in ranks:
            for kind, cause in FAULT_KINDS:
                if noise == "arrivals" and kind == "row":
                    continue  # a slow receiver is late itself: it is the column that shows, as column comm does here
                for factor in factors:
                    # More tokens (mixed) change nothing in the waits: one factor tells whether the cause is found.
                    if cause != "mixed" or factor == TARGET_FACTOR[kind]:
                        yield FaultCase(noise, num_ranks, ((kind, cause),), factor)
            if num_ranks >= 8 and 3.0 in factors:
                for pair in PAIRS:
                    yield FaultCase(noise, num_ranks, pair, 3.0)


@dataclass(frozen=True)
class CleanCase:
    noise: str
    num_ranks: int
    burden: str


def run_clean(case: CleanCase, num_seeds: int, methods: Sequence[str] = METHODS) -> dict[str, Counter]:
    """False alarms by kind, for each method; of num_seeds * NUM_WINDOWS windows."""
    alarms = {method: Counter() for method in methods}
    for seed in seeds(case.noise, num_seeds):
        matrices = generate(job_of(case.noise, case.num_ranks, seed, **CLEAN[case.burden]))
        for method, counts in alarms.items():
            if method == "ratio":
                counts.update(kind for kind, *_ in ratio_to_mean.places(matrices.wait_us_WNN))
            else:
                counts.update(finding.kind for finding in find_faults(matrices, method)[1])
    return alarms


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _arguments(argv)
    shape = {
        "windows": NUM_WINDOWS,
        "onset": ONSET,
        "seeds": arguments.seeds,
        "first_seed": FIRST_SEED,
        "cv": SyntheticJob.cv,
        "compared_seeds": arguments.compared_seeds,
    }
    planted_cases = (
        list(cases(arguments.noises, arguments.ranks, arguments.factors)) if "faults" in arguments.parts else []
    )
    clean_cases = [CleanCase(n, r, b) for n in arguments.noises for r in arguments.ranks for b in CLEAN]
    clean_cases = clean_cases if "clean" in arguments.parts else []
    name = "faults_tuning" if arguments.tuning else "faults"
    planted, clean = BenchmarkReport(name, shape), BenchmarkReport(f"{name}_clean", shape)
    with ProcessPoolExecutor(arguments.processes) as pool:
        work = partial(_fault_row, num_seeds=arguments.seeds, compared_seeds=arguments.compared_seeds)
        planted.rows += pool.map(work, planted_cases)
        work = partial(_clean_row, num_seeds=arguments.seeds, compared_seeds=arguments.compared_seeds)
        clean.rows += pool.map(work, clean_cases)
    for report, keys in ((planted, _FAULT_KEYS), (clean, _CLEAN_KEYS)):
        if arguments.add:
            _add_earlier(report, keys)
        report.finish()
    print("\nall noises together")
    print(table(list(summary(planted.rows))))
    print()
    print(table(list(clean_summary(clean.rows))))
    missed = list(misses(planted.rows, clean.rows))
    print("\n".join(missed) if missed else "every target is met")
    return 0


_FAULT_KEYS, _CLEAN_KEYS = ("noise", "ranks", "fault", "factor"), ("noise", "ranks", "burden")


def _fault_row(case: FaultCase, num_seeds: int, compared_seeds: int) -> dict[str, Any]:
    row = {
        "noise": case.noise,
        "ranks": case.num_ranks,
        "factor": case.factor,
        "fault": "+".join(f"{kind} {cause}" for kind, cause in case.faults),
    }
    row |= run_case(case, num_seeds, ("robust",))["robust"].columns()
    others = run_case(case, compared_seeds, METHODS[1:])
    for method, tally in others.items():
        row |= {f"{method}_planted": tally.planted, f"{method}_found": tally.found, f"{method}_wrong": tally.wrong}
        row |= {f"{method}_precision": shown(tally.precision), f"{method}_recall": shown(tally.recall)}
    return row


def _clean_row(case: CleanCase, num_seeds: int, compared_seeds: int) -> dict[str, Any]:
    alarms = run_clean(case, num_seeds, ("robust",))["robust"]
    row = {"noise": case.noise, "ranks": case.num_ranks, "burden": case.burden, "windows": num_seeds * NUM_WINDOWS}
    row |= {kind: alarms[kind] for kind in ("column", "row", "point")}
    row["per_1000_windows"] = round(1000 * alarms.total() / row["windows"], 2)
    for method, counts in run_clean(case, compared_seeds, METHODS[1:]).items():
        row[f"{method}_per_1000"] = round(1000 * counts.total() / (compared_seeds * NUM_WINDOWS), 2)
    return row


def _add_earlier(report: BenchmarkReport, keys: Sequence[str]) -> None:
    """Puts before the rows those of other cases that the file has."""
    path = RESULTS / f"{report.name}.json"
    earlier = json.loads(path.read_text())["rows"] if path.exists() else []
    ours = {tuple(row[key] for key in keys) for row in report.rows}
    report.rows[:0] = [row for row in earlier if tuple(row[key] for key in keys) not in ours]
    report.rows.sort(key=lambda row: [(*ALL_NOISES, *TUNING).index(row["noise"]), *(row[key] for key in keys[1:])])


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.diagnosis.bench_faults")

    def of(kind):
        return lambda text: tuple(kind(word) for word in text.split(","))

    parser.add_argument("--seeds", type=int, default=200, help="jobs of each case")
    parser.add_argument("--compared-seeds", type=int, default=50, help="jobs of each case that the other methods see")
    parser.add_argument("--parts", type=of(str), default=("faults", "clean"))
    parser.add_argument("--add", action="store_true", help="keep the rows of other cases that the result files have")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--noises", type=of(str), help=f"default: {','.join(ALL_NOISES)}")
    parser.add_argument("--tuning", action="store_true", help=f"instead of these: {','.join(TUNING)}")
    parser.add_argument("--ranks", type=of(int), default=RANKS)
    parser.add_argument("--factors", type=of(float), default=FACTORS)
    arguments = parser.parse_args(argv)
    arguments.noises = arguments.noises or (tuple(TUNING) if arguments.tuning else ALL_NOISES)
    return arguments


if __name__ == "__main__":
    sys.exit(main())
