"""Report: everything known about a run's waits, for the terminal, the page, the server and the balancer.

report = analyse("run/diagnose")          # a log directory
report = Report.of_records(records)       # windows in memory, as a server keeps them
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..log.events import WindowRecord
from ..log.reader import LogProblem, no_line, open_log
from ..windows.matrices import WindowMatrices
from ..windows.window_sums import WindowSums, most_kept
from .analysis import Finding, Outliers, find

# Values of Report.state_WN.
OK, SLOW, WAITS, IDLE, SILENT = range(5)
STATE_NAMES = ("ok", "slow", "waits", "idle", "silent")
_MOST_PROBLEMS_IN_JSON = 50


@dataclass(frozen=True, eq=False)
class ExpertLoad:
    """One window. L layers, P slots of all ranks (rank-major), E experts.

    epoch: of the placement. layers_L: model layer numbers. physical_to_logical_LP: expert of each slot, -1 for none.
    slot_rows_LP: tokens each slot got. load_LE: the same by expert. rank_of_slot_P: who holds the slot.
    """

    epoch: int
    layers_L: np.ndarray
    physical_to_logical_LP: np.ndarray
    slot_rows_LP: np.ndarray
    load_LE: np.ndarray
    rank_of_slot_P: np.ndarray


@dataclass(frozen=True, eq=False)
class Report:
    """matrices: the windows as arrays. outliers: how far each column, row and point stands out in each window.

    findings: most certain first. problems: what of the log could not be used, the first of each file one by one.
    num_skipped: lines that could not be used. num_windows: windows read; more than len(matrices.window_W) when a long
    log was thinned.
    """

    matrices: WindowMatrices
    outliers: Outliers
    findings: tuple[Finding, ...]
    problems: tuple[LogProblem, ...]
    num_windows: int
    num_skipped: int = 0

    @staticmethod
    def of_records(records: Sequence[WindowRecord], method: str = "robust") -> "Report":
        """records: of one job, at least one, in any order."""
        return Report.of(WindowMatrices.of(records), method=method)

    @staticmethod
    def of(
        matrices: WindowMatrices, problems: Sequence[LogProblem] = (), num_skipped: int = 0, method: str = "robust"
    ) -> "Report":
        outliers, findings = find(matrices, method)
        num_windows = int(matrices.num_windows_W.sum())
        return Report(matrices, outliers, tuple(findings), tuple(problems), num_windows, num_skipped)

    @property
    def num_ranks(self) -> int:
        return self.matrices.num_ranks

    def to_json(self) -> dict:
        """The object that `eprt diagnose DIR --json` prints (eprt.findings/1).

        problems: skipped_lines, and the first problems in words. windows_per_entry: 1 unless a long log was thinned.
        """
        told = [str(problem) for problem in self.problems[:_MOST_PROBLEMS_IN_JSON]]
        return {
            "schema": "eprt.findings/1",
            "num_ranks": self.num_ranks,
            "windows": self.num_windows,
            "windows_per_entry": int(self.matrices.num_windows_W.max()),
            "findings": [finding.to_json() for finding in self.findings],
            "problems": {"skipped_lines": self.num_skipped, "first": told},
        }

    @property
    def state_WN(self) -> np.ndarray:
        """int8 [W, N]: OK, SLOW (a column finding in this window), WAITS (a row finding), IDLE (no tokens of its own),
        SILENT (no line, or no call); STATE_NAMES has their names."""
        matrices = self.matrices
        out_WN = np.full(matrices.calls_WN.shape, OK, dtype=np.int8)
        sent_WN = np.nansum(matrices.sent_tokens_WNN, axis=2)
        out_WN[sent_WN == 0] = IDLE
        for finding in self.findings:
            if finding.kind != "point":
                within_W = (matrices.last_window_W >= finding.first_window) & (matrices.window_W <= finding.last_window)
                out_WN[within_W, finding.rank] = SLOW if finding.kind == "column" else WAITS
        out_WN[matrices.calls_WN == 0] = SILENT
        return out_WN

    def expert_load(self, w: int) -> ExpertLoad | None:
        """Of the w-th window; None unless every rank's line has it."""
        places = [self.matrices.experts.get((w, rank)) for rank in range(self.num_ranks)]
        known = [part for place in places if place is not None and (part := place()) is not None]
        if len(known) < self.num_ranks or len({part.layers for part in known}) > 1:
            return None
        expert_LP = np.concatenate([np.array(part.expert_of_slot, dtype=np.int64) for part in known], axis=1)
        rows_LP = np.concatenate([np.array(part.rows, dtype=np.int64) for part in known], axis=1)
        load_LE = np.zeros((len(expert_LP), int(expert_LP.max(initial=-1)) + 1), dtype=np.int64)
        for layer, (experts, rows) in enumerate(zip(expert_LP, rows_LP)):
            np.add.at(load_LE[layer], experts[experts >= 0], rows[experts >= 0])
        slots = [len(part.rows[0]) if part.rows else 0 for part in known]
        rank_P = np.repeat(np.arange(self.num_ranks), slots)
        epoch = max(part.epoch for part in known)
        return ExpertLoad(epoch, np.array(known[0].layers), expert_LP, rows_LP, load_LE, rank_P)


def analyse(
    directory: str | Path,
    method: str = "robust",
    *,
    run: int | None = None,
    windows: tuple[int, int] | None = None,
) -> Report:
    """Reads a log directory and says what stands out. The log may be larger than the memory: lines are added up.

    method: "robust" (medians, docs/diagnosis.md) or "zscore" (plain mean and standard deviation, for comparison).
    run: by number, of a directory that several runs have used; None: the newest. windows: the first and the last.
    OSError when the directory cannot be read; ValueError when it holds no such log, run or window, or no usable line.
    """
    reader = open_log(directory, run, windows)
    sums = WindowSums(reader.run.num_ranks, (), most_kept(reader.run.num_ranks))
    for record, place in reader.new_records():
        sums.add(record, None if record.experts is None else place.experts)
    problems = [*reader.problems.told(), *reader.remarks()]
    if reader.node_of_rank is None:
        raise no_line(directory, problems)
    sums.node_of_rank = reader.node_of_rank
    matrices = sums.matrices()
    del sums  # as large as what is made of them
    return Report.of(matrices, problems, reader.problems.num_lines, method)
