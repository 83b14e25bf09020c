"""What an oracle finds in simulated serving jobs, beside the detector: it knows jobs with the fault and without.

It learns from jobs of the same family, of the same size and with the same fault, which sum of what the log says about
a rank tells them apart best (Fisher's discriminant). It is not told the rank and not the window, and may name a wrong
rank as often as the detector: once in a thousand clean windows. What it misses, the noise hides from such sums.

    python -m benchmarks.diagnosis.serving_oracle --families heavy --ranks 4,8
"""

import argparse
from collections.abc import Sequence
from typing import Any

import numpy as np
from eprt.diagnostics import Report, WindowMatrices
from eprt.diagnostics.windows.window_sums import WindowSums

from benchmarks.diagnosis.bench_serving_faults import NUM_WINDOWS, ONSET, ServingCase, is_named
from benchmarks.diagnosis.serving_job import ServingJob, play_records
from benchmarks.diagnosis.serving_noise import SEEN, UNSEEN, UNSEEN_SEEDS
from benchmarks.tools.report import BenchmarkReport, table

NUM_RANKS = 0
ON_REQUEST = "takes 20 minutes"

FALSE_PER_WINDOW = 1e-3
CASES = {4: 2.0, 8: 1.5, 16: 1.5}  # ranks -> factor
KINDS = ("column comp", "column comm")
ONSETS = range(3, 10)  # windows in which it looks for one
_LEARNED = 500_000  # the first seed of the jobs that it learns from
_SMALLEST = 1e-6  # part of the features' variance, added to it


def features(matrices: WindowMatrices) -> np.ndarray:
    """[O, N, F]: how what the log says about each rank changes at each of ONSETS, in microseconds and in logarithms."""
    columns = []
    for wait_us_WNN in (matrices.dispatch_us_WNN, matrices.combine_us_WNN):
        known_WNN = wait_us_WNN.copy()
        known_WNN[:, np.eye(matrices.num_ranks, dtype=bool)] = np.nan
        for axis in (1, 2):  # of those who wait for the rank, and of those it waits for
            for summary in (np.nanmedian, np.nanmean, np.nanmin):
                value_WN = summary(known_WNN, axis=axis)
                columns += [value_WN, np.log(value_WN + 1)]
    columns += [matrices.blocked_us_WN, matrices.compute_us_WN]
    values_WNF = np.stack(columns, axis=-1)
    beside_WNF = values_WNF - np.median(values_WNF, axis=1, keepdims=True)
    return np.stack([_change(beside_WNF, onset) for onset in ONSETS])


def _change(values_WNF: np.ndarray, onset: int) -> np.ndarray:
    before_WNF, after_WNF = values_WNF[:onset], values_WNF[onset:]
    return np.concatenate(
        [
            np.median(after_WNF, axis=0) - np.median(before_WNF, axis=0),
            after_WNF.mean(axis=0) - before_WNF.mean(axis=0),
        ],
        axis=1,
    )


def _matrices(job: ServingJob) -> WindowMatrices:
    return WindowSums.from_records(play_records(job)).matrices()


def _faulty(case: ServingCase, seeds: Sequence[int]) -> tuple[list[np.ndarray], list[int], float]:
    """Features of jobs, their faulty ranks, and the part of the jobs in which the detector names them."""
    jobs, ranks, num_named = [], [], 0
    for seed in seeds:
        job = case.job(seed)
        assert job.fault is not None
        matrices = _matrices(job)
        jobs.append(features(matrices))
        ranks.append(job.fault.place[0])
        num_named += any(is_named(job.fault, finding) for finding in Report.from_matrices(matrices).findings)
    return jobs, ranks, num_named / len(jobs)


class Oracle:
    """A sum of features, and what it reaches by chance in so many clean windows.

    clean_JONF: features of clean jobs.
    faulty_XF: of faulty ranks at their onset.
    """

    def __init__(self, clean_JONF: np.ndarray, faulty_XF: np.ndarray):
        clean_XF = clean_JONF[:, ONSETS.index(ONSET)].reshape(-1, clean_JONF.shape[-1])
        # Within what is seen at all but the rarest times: one long tail says little, wherever it is.
        self._range_2F = np.quantile(np.concatenate([clean_XF, faulty_XF]), (0.005, 0.995), axis=0)
        clean_XF, faulty_XF = self._clipped(clean_XF), self._clipped(faulty_XF)
        scale_F = np.maximum(1e-9, clean_XF.std(axis=0))
        within_FF = np.cov((clean_XF / scale_F).T)
        difference_F = (faulty_XF.mean(axis=0) - clean_XF.mean(axis=0)) / scale_F
        self._weight_F = np.linalg.solve(within_FF + _SMALLEST * np.eye(len(within_FF)), difference_F) / scale_F
        self._spread_O1 = (self._clipped(clean_JONF) @ self._weight_F).std(axis=(0, 2))[:, None]
        largest_J = self.scores(clean_JONF).max(axis=(1, 2))
        self._threshold = float(np.quantile(largest_J, 1 - FALSE_PER_WINDOW * NUM_WINDOWS))

    def _clipped(self, values: np.ndarray) -> np.ndarray:
        return np.clip(values, *self._range_2F)

    def scores(self, features_ONF: np.ndarray) -> np.ndarray:
        """[..., O, N]"""
        return self._clipped(features_ONF) @ self._weight_F / self._spread_O1

    def named(self, features_ONF: np.ndarray) -> int | None:
        """The rank that it takes to be faulty, if any."""
        score_N = self.scores(features_ONF).max(axis=0)
        return int(score_N.argmax()) if score_N.max() > self._threshold else None


def compare(case: ServingCase, num_clean: int, num_faulty: int, first: int) -> dict[str, Any]:
    """A row of the table."""
    clean = ServingCase(case.family, case.num_ranks, "clean")
    clean_JONF = np.stack([features(_matrices(clean.job(_LEARNED + seed))) for seed in range(num_clean)])
    learned, ranks, _ = _faulty(case, range(_LEARNED, _LEARNED + num_faulty))
    at = ONSETS.index(ONSET)
    oracle = Oracle(clean_JONF, np.array([each_ONF[at, rank] for each_ONF, rank in zip(learned, ranks)]))
    asked, ranks, named = _faulty(case, range(first, first + num_faulty))
    return {
        "family": case.family,
        "ranks": case.num_ranks,
        "fault": case.kind,
        "factor": case.factor,
        "jobs": num_faulty,
        "detector": round(named, 3),
        "oracle": round(float(np.mean([oracle.named(job) == rank for job, rank in zip(asked, ranks)])), 3),
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.diagnosis.serving_oracle")
    words = lambda text: tuple(text.split(","))  # noqa: E731
    parser.add_argument("--families", type=words, default=(*SEEN, *UNSEEN))
    parser.add_argument("--ranks", type=lambda text: tuple(map(int, text.split(","))), default=tuple(CASES))
    parser.add_argument("--kinds", type=words, default=KINDS)
    parser.add_argument("--clean", type=int, default=400, help="jobs without a fault that it learns from")
    parser.add_argument(
        "--faulty", type=int, default=40, help="jobs with the fault, to learn from and to be asked about"
    )
    options = parser.parse_args(argv)
    config = {"windows": NUM_WINDOWS, "onset": ONSET, "clean_jobs": options.clean, "first_seed": UNSEEN_SEEDS}
    report = BenchmarkReport("serving_oracle", config)
    for num_ranks in options.ranks:
        for family in options.families:
            for kind in options.kinds:
                case = ServingCase(family, num_ranks, kind, CASES[num_ranks])
                report.add_row(**compare(case, options.clean, options.faulty, UNSEEN_SEEDS))
                print(report.rows[-1], flush=True)
    report.finish()
    print(table(report.rows))
    return 0


if __name__ == "__main__":
    main()
