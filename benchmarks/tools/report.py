"""The report of one benchmark: a table on the screen and a JSON file in benchmarks/results.

    report = BenchmarkReport("cpu_linear", {"hidden": 2048})
    for m in (1, 8, 64):
        report.add_row(m=m, **times["eprt"].columns("eprt"))
    report.finish()

The file says what was measured (commit, whether the tree was clean, date) and where (machine, versions).
"""

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.tools import provenance
from eprt import machine

ROOT = provenance.ROOT
RESULTS = ROOT / "benchmarks" / "results"
# Beside eprt's own requirements, whose versions machine.describe() tells.
PEERS = ("scipy", "triton", "nvidia-cuda-nvrtc", "deep_ep", "flash_mla", "sgl-deep-gemm")


class BenchmarkReport:
    """Collects the rows of one benchmark. Only the rank that reports should make one."""

    def __init__(self, name: str, config: Mapping[str, Any]):
        self.name, self.config = name, dict(config)
        self.rows: list[dict[str, Any]] = []

    def add_row(self, **columns: Any) -> None:
        self.rows.append(columns)

    def finish(self, directory: Path = RESULTS) -> Path:
        """Prints the table and writes directory/NAME.json. Returns its path."""
        print(f"\n{self.name}  {' '.join(f'{k}={v}' for k, v in self.config.items())}")
        print(table(self.rows), flush=True)
        return self.write(directory)

    def write(self, directory: Path = RESULTS) -> Path:
        """Writes directory/NAME.json, with the rows that there are."""
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / f"{self.name}.json"
        content = {"name": self.name, "config": self.config, **measured_here(), "rows": self.rows}
        path.write_text(json.dumps(content, indent=1, default=str) + "\n")
        return path


def measured_here() -> dict[str, Any]:
    """What was measured and where: commit, whether the tree was clean, date, machine."""
    commit, clean = provenance.measured_commit()
    here = machine.describe().to_json()
    here["versions"] |= {name: found for name in PEERS if (found := machine.version(name))}
    return {"commit": commit, "clean": clean, "date": datetime.date.today().isoformat(), "machine": here}


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Columns in order of first appearance, numbers to four significant digits, right-aligned.

    The spread columns (…_p10_…, …_p90_…) are in the file only: a table must fit a screen.
    """
    columns = [c for c in dict.fromkeys(c for row in rows for c in row) if "_p10" not in c and "_p90" not in c]
    cells = [columns, *([_cell(row.get(column, "")) for column in columns] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths)).rstrip() for line in cells)


def _cell(value: Any) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:.4g}" if abs(value) < 1e4 else f"{value:.0f}"
