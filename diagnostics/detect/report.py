"""Report: the waits of a run and the findings in them. Knows no terminal, page or server.

report = analyse("run/diagnose")          # a log directory
report = Report.of_records(records)       # windows in memory, as a server keeps them
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..log.events import WindowRecord
from ..log.reader import LogProblem, no_usable_line, open_log
from ..windows.baseline import Baseline
from ..windows.expert_load import ExpertLoad
from ..windows.matrices import WindowMatrices
from ..windows.window_sums import WindowSums, most_kept
from .analysis import Finding, analyse_matrices
from .early import EarlyRank
from .facts import with_facts
from .sightings import Outliers
from .topology import LinkTopology

# Values of Report.state_WN.
OK, SLOW, WAITS, IDLE, SILENT = range(5)
STATE_NAMES = ("ok", "slow", "waits", "idle", "silent")
_MOST_PROBLEMS_IN_JSON = 50


@dataclass(frozen=True, eq=False)
class Report:
    """A run of N ranks."""

    matrices: WindowMatrices  # the windows as arrays
    outliers: Outliers  # how far each column, row and point stands out in each window
    findings: tuple[Finding, ...]  # those that last first, then those that cost most
    problems: tuple[LogProblem, ...]  # of the log, the first of each file one by one
    num_skipped: int = 0  # lines that could not be used
    early: tuple[EarlyRank, ...] = ()  # ranks that are faster than their peers, or have less to do: no fault

    @staticmethod
    def of_records(records: Sequence[WindowRecord], method: str = "robust") -> "Report":
        """records: of one run, at least one, in any order."""
        return Report.from_matrices(WindowSums.from_records(records).matrices(), method=method)

    @staticmethod
    def from_matrices(
        matrices: WindowMatrices,
        problems: Sequence[LogProblem] = (),
        num_skipped: int = 0,
        method: str = "robust",
        *,
        topology: LinkTopology | None = None,
        baseline: Baseline | None = None,
    ) -> "Report":
        """topology: of the links; None: learned. baseline: of an earlier run, to compare with as well."""
        found = analyse_matrices(matrices, method, topology, baseline)
        findings = tuple(with_facts(found.findings, matrices))
        return Report(matrices, found.outliers, findings, tuple(problems), num_skipped, found.early)

    @property
    def num_ranks(self) -> int:
        return self.matrices.num_ranks

    @property
    def num_windows(self) -> int:
        """Windows read; more than len(matrices.window_W) when a long log was thinned."""
        return int(self.matrices.num_windows_W.sum())

    def to_json(self) -> dict:
        """eprt.findings/1, as `eprt diagnose DIR --json` prints it. windows_per_entry: over 1 in a thinned log."""
        first = [str(problem) for problem in self.problems[:_MOST_PROBLEMS_IN_JSON]]
        return {
            "schema": "eprt.findings/1",
            "num_ranks": self.num_ranks,
            "windows": self.num_windows,
            "windows_per_entry": int(self.matrices.num_windows_W.max()),
            "findings": [finding.to_json() for finding in self.findings],
            "early": [rank.to_json() for rank in self.early],
            "problems": {"skipped_lines": self.num_skipped, "first": first},
        }

    @property
    def state_WN(self) -> np.ndarray:
        """int8 [W, N]: OK, SLOW (a column finding or a hang in this window), WAITS (a row finding), IDLE (no tokens of
        its own), SILENT (no line, or no call); STATE_NAMES has their names."""
        matrices = self.matrices
        out_WN = np.full(matrices.calls_WN.shape, OK, dtype=np.int8)
        sent_WN = np.nansum(matrices.sent_tokens_WNN, axis=2)
        out_WN[sent_WN == 0] = IDLE
        for finding in self.findings:
            if finding.rank is not None:
                within_W = (matrices.last_window_W >= finding.first_window) & (matrices.window_W <= finding.last_window)
                out_WN[within_W, finding.rank] = WAITS if finding.kind == "row" else SLOW
        out_WN[matrices.calls_WN == 0] = SILENT
        return out_WN

    def expert_load(self, w: int) -> ExpertLoad | None:
        """Of the w-th window; None unless every rank's line has it."""
        kept = [self.matrices.experts.get((w, rank)) for rank in range(self.num_ranks)]
        return ExpertLoad.from_rows([None if one is None else one.experts for one in kept])


def analyse(
    directory: str | Path,
    method: str = "robust",
    *,
    run: int | None = None,
    windows: tuple[int, int] | None = None,
    baseline: str | Path | None = None,
    topology: str | Path | None = None,
) -> Report:
    """Reads a log directory and finds what stands out. The log may be larger than the memory: lines are added up.

    baseline: a file that Baseline.save has written. topology: a file of eprt.topology/1; None: learned from the waits.
    method: "robust" (medians, docs/diagnosis.md) or "zscore" (plain mean and standard deviation, for comparison).
    run: by number, of a directory that several runs have used; None: the newest. windows: the first and the last.
    OSError when the directory cannot be read; ValueError when it holds no such log, run or window, or no usable line.
    """
    reader = open_log(directory, run, windows)
    sums = WindowSums(reader.run.num_ranks, most_kept(reader.run.num_ranks))
    for record, place in reader.new_records():
        sums.add_record(record, place)
    problems = reader.problems()
    if not sums.spans:
        raise no_usable_line(directory, problems)
    matrices = sums.matrices()
    del sums  # as large as the matrices
    return Report.from_matrices(
        matrices,
        problems,
        reader.skipped.num_lines,
        method,
        topology=None if topology is None else LinkTopology.from_file(topology, matrices.node_of_rank_N),
        baseline=None if baseline is None else Baseline.load(baseline),
    )
