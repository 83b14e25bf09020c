"""eprt diagnose DIR: which rank or link is slow. Also `python -m eprt.diagnostics`."""

import argparse
import json
import sys
from collections.abc import Sequence

import numpy as np

from .analysis import MIN_RANKS_FOR_MEDIANS
from .evidence import nan_median
from .matrices import WindowMatrices
from .report import Report, analyse

MOST_RANKS_SHOWN = 16


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="eprt diagnose",
        description="Reads the diagnosis log of a run and reports slow ranks and links. "
        "Exit status 0: none found, 1: some found, 2: the log cannot be read.",
    )
    parser.add_argument("directory", metavar="DIR", help="holds diagnose_rank*.log")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print one JSON object (eprt.findings/1)")
    form.add_argument("--text", action="store_true", help="print sentences and the wait matrix (the default)")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    arguments = build_parser().parse_args(argv)
    try:
        report = analyse(arguments.directory)
    except (OSError, ValueError) as error:
        print(f"eprt diagnose: {error}", file=sys.stderr)
        return 2
    for problem in report.problems:
        print(f"eprt diagnose: skipped: {problem}", file=sys.stderr)
    print(json.dumps(report.to_json()) if arguments.json else to_text(report))
    return 1 if report.findings else 0


def to_text(report: Report) -> str:
    matrices, findings = report.matrices, report.findings
    lines = [f"{matrices.num_ranks} ranks, {len(matrices.window_W)} windows"]
    if matrices.num_ranks == 1:
        lines.append("one rank waits for nobody: there is nothing to compare")
    elif matrices.num_ranks < MIN_RANKS_FOR_MEDIANS:
        lines.append("fewer than four ranks: only a rank that all others wait for can be told from its links")
    for finding in findings:
        where = f"rank {finding.rank}" if finding.kind != "point" else f"rank {finding.src} <- rank {finding.dst}"
        lines.append(
            f"\n{finding.kind} {where}  [{finding.cause}]  {finding.ratio:.2g}x, score {finding.score:.1f}, "
            f"windows {finding.first_window}..{finding.last_window}, confidence {finding.confidence:.2f}"
        )
        lines += [f"  {finding.evidence}", f"  {finding.advice}"]
    if not findings:
        lines.append("no rank and no link stands out")
    if 1 < matrices.num_ranks <= MOST_RANKS_SHOWN:
        lines += ["", _matrix(matrices)]
    return "\n".join(lines)


def _matrix(matrices: WindowMatrices) -> str:
    """Median wait per call over all windows, one row per waiting rank."""
    wait_us_NN = nan_median(matrices.wait_us_WNN)
    ranks = range(matrices.num_ranks)
    lines = ["us per call that rank (row) waits for rank (column):", "      " + "".join(f"{j:>7}" for j in ranks)]
    for i in ranks:
        cells = "".join(f"{'.' if i == j or np.isnan(v) else f'{v:.0f}':>7}" for j, v in enumerate(wait_us_NN[i]))
        lines.append(f"{i:>6}{cells}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
