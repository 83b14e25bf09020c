"""DeepXTrace's own analysis beside eprt's, on the logs of the same simulated jobs (docs/diagnosis-noise.md).

Its source (github.com/antgroup/DeepXTrace) is not part of eprt: the path of a checkout is an argument. Each window of
a log becomes what DeepXTrace gathers on its rank 0: for dispatch and combine an int64 matrix of how long each rank
waited for each other. `Diagnose.diagnose_matrix` then analyses it with the thresholds that it has by default. A place
counts where it is named in two windows, by either matrix.

    python -m benchmarks.diagnosis.deepxtrace PATH --commit COMMIT
"""

import argparse
import importlib.util
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from eprt.diagnostics import Report, WindowRecord

from benchmarks.diagnosis.bench_serving_faults import NUM_WINDOWS, ServingCase, is_named
from benchmarks.diagnosis.serving_job import ServingFault, play_records
from benchmarks.diagnosis.serving_noise import SEEN, UNSEEN, UNSEEN_SEEDS
from benchmarks.tools.report import BenchmarkReport

NUM_RANKS = 0
ON_REQUEST = "needs a checkout of DeepXTrace"

KINDS = ("column comp", "column comm", "row", "point")
FACTORS = (2.0, 3.0, 5.0, 10.0)
_SOURCE = Path("src/deepxtrace/diagnose.py")


def load_tool(path: Path) -> ModuleType:
    """OSError without the file."""
    spec = importlib.util.spec_from_file_location("deepxtrace_diagnose", path / _SOURCE)
    if spec is None or spec.loader is None or not (path / _SOURCE).is_file():
        raise FileNotFoundError(f"{path / _SOURCE}: no such file; is {path} a checkout of DeepXTrace?")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def gathered(records: Sequence[WindowRecord]) -> np.ndarray:
    """int64 [window][rank][dispatch, combine][other rank], as its rank 0 has it; microseconds, in all calls."""
    num_ranks = records[0].num_ranks
    values = [(one.dispatch_wait_us, one.combine_wait_us) for one in records]
    return np.array(values).astype(np.int64).reshape(-1, num_ranks, 2, num_ranks)


def places_named(records: Sequence[WindowRecord], analyse: Callable[..., dict[str, list]]) -> set[tuple]:
    """(kind, rank) or ("point", waiting rank, awaited rank) of what it names in at least two windows."""
    counts: Counter = Counter()
    for stats_N2N in gathered(records):
        named = set()
        for phase in range(2):
            found = analyse(stats_N2N[:, phase, :])
            named |= {("column", int(column[0])) for column in found["abnormal_cols"]}
            named |= {("row", int(row[0])) for row in found["abnormal_rows"]}
            named |= {("point", int(point[0]), int(point[1])) for point in found["abnormal_points"]}
        counts.update(named)
    return {place for place, count in counts.items() if count >= 2}


def is_right(fault: ServingFault, place: tuple) -> bool:
    """A slow receiver's column counts, as it does for eprt."""
    kind = fault.kind.split()[0]
    if kind == "point":
        return place == ("point", *fault.place)
    return place[1:] == fault.place and (place[0] == kind or (kind == "row" and place[0] == "column"))


def compare(case: ServingCase, seeds: range, analyse: Callable[..., dict[str, list]]) -> Counter:
    counts: Counter = Counter()
    for seed in seeds:
        job = case.job(seed)
        records, fault = play_records(job), job.fault
        findings, places = Report.of_records(records).findings, places_named(records, analyse)
        ours = sum(fault is not None and is_named(fault, finding) for finding in findings)
        theirs = sum(fault is not None and is_right(fault, place) for place in places)
        counts += Counter(
            jobs=1,
            eprt_named=bool(ours),
            eprt_false=len(findings) - ours,
            deepxtrace_named=bool(theirs),
            deepxtrace_false=len(places) - theirs,
        )
    return counts


def rows(ranks: Sequence[int], seeds: Sequence[int], analyse: Callable[..., dict[str, list]]) -> list[dict[str, Any]]:
    out = []
    for num_ranks in ranks:
        for kind, factor in [("clean", 1.0), *((kind, factor) for kind in KINDS for factor in FACTORS)]:
            counts: Counter = Counter()
            for family in (*SEEN, *UNSEEN):
                counts += compare(ServingCase(family, num_ranks, kind, factor), seeds, analyse)
            row: dict[str, Any] = {"ranks": num_ranks, "fault": kind, "factor": factor, "jobs": counts["jobs"]}
            for tool in ("eprt", "deepxtrace"):
                named, false = counts[f"{tool}_named"], counts[f"{tool}_false"]
                row[f"{tool}_recall"] = round(named / counts["jobs"], 4) if kind != "clean" else ""
                row[f"{tool}_precision"] = round(named / (named + false), 4) if named + false else ""
                row[f"{tool}_false_per_1000_windows"] = round(1000 * false / (counts["jobs"] * NUM_WINDOWS), 2)
            out.append(row)
    return out


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.diagnosis.deepxtrace")
    parser.add_argument("path", type=Path, help="a checkout of DeepXTrace")
    parser.add_argument("--commit", required=True, help="of the checkout, for the result file")
    parser.add_argument("--seeds", type=int, default=10, help="jobs of each case and family")
    parser.add_argument("--first-seed", type=int, default=UNSEEN_SEEDS, help="one that nobody has looked at")
    parser.add_argument("--ranks", type=lambda text: [int(word) for word in text.split(",")], default=[4, 8, 16])
    arguments = parser.parse_args(argv)
    analyse = load_tool(arguments.path).Diagnose.diagnose_matrix
    first = arguments.first_seed
    config = {
        "windows": NUM_WINDOWS,
        "seeds": arguments.seeds,
        "first_seed": first,
        "deepxtrace": arguments.commit,
    }
    report = BenchmarkReport("faults_deepxtrace", config)
    report.rows += rows(arguments.ranks, range(first, first + arguments.seeds), analyse)
    report.finish()
    return 0


if __name__ == "__main__":
    main()
