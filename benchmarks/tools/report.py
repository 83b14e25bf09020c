"""What every benchmark shares: fair timing, one table on the screen, one JSON file in benchmarks/results.

    report = Report("cpu_linear", {"hidden": 2048})
    for m in (1, 8, 64):
        times = measure({"eprt": lambda: ours(m), "torch": lambda: theirs(m)})
        report.row(m=m, **times["eprt"].columns("eprt"), **times["torch"].columns("torch"),
                   speedup=times["torch"].median_s / times["eprt"].median_s)
    report.finish()

On a shared machine absolute times drift, so competitors are timed alternately in one run and compared by ratio.
"""

import json
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eprt import machine

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"


@dataclass(frozen=True)
class Timing:
    """Seconds per call over `samples` samples: the median, and the 10th and 90th percentile as its spread."""

    median_s: float
    p10_s: float
    p90_s: float
    samples: int

    @staticmethod
    def of(samples_s: Sequence[float]) -> "Timing":
        if not samples_s:
            raise ValueError("a timing needs at least one sample")
        ordered = sorted(samples_s)
        return Timing(statistics.median(ordered), quantile(ordered, 0.1), quantile(ordered, 0.9), len(ordered))

    def columns(self, name: str, unit: str = "us") -> dict[str, float]:
        """{"NAME_us": median, "NAME_p10_us": ..., "NAME_p90_us": ...}, for Report.row."""
        scale = {"s": 1, "ms": 1e3, "us": 1e6, "ns": 1e9}[unit]
        values = {"": self.median_s, "_p10": self.p10_s, "_p90": self.p90_s}
        return {f"{name}{suffix}_{unit}": float(f"{value * scale:.5g}") for suffix, value in values.items()}


def quantile(ordered: Sequence[float], q: float) -> float:
    """Linear interpolation between the two nearest of sorted values."""
    position = q * (len(ordered) - 1)
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def measure(
    candidates: Mapping[str, Callable[[], Any]],
    *,
    samples: int = 30,
    calls_per_sample: int = 1,
    warmup: int = 3,
    before: Callable[[], Any] | None = None,
) -> dict[str, Timing]:
    """Times the candidates alternately: one sample of each, `samples` times over, in an order that turns each round.

    calls_per_sample: calls timed together, for calls too short to time alone. before: run untimed before each sample
    (a barrier between ranks, a cache flush). The number of calls is fixed, so that ranks stay together.
    """
    names = list(candidates)
    for name in names:
        for _ in range(warmup):
            candidates[name]()
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(samples):
        for i in range(len(names)):
            name = names[(turn + i) % len(names)]
            call = candidates[name]
            if before is not None:
                before()
            start = time.perf_counter()
            for _ in range(calls_per_sample):
                call()
            seconds[name].append((time.perf_counter() - start) / calls_per_sample)
    return {name: Timing.of(values) for name, values in seconds.items()}


class Report:
    """Collects the rows of one benchmark. Only the rank that reports should make one."""

    def __init__(self, name: str, config: Mapping[str, Any]):
        self.name, self.config = name, dict(config)
        self.rows: list[dict[str, Any]] = []

    def row(self, **columns: Any) -> None:
        self.rows.append(columns)

    def finish(self, directory: Path = RESULTS) -> Path:
        """Prints the table and writes directory/NAME.json: name, config, commit, machine, rows. Returns its path."""
        print(f"\n{self.name}  {' '.join(f'{k}={v}' for k, v in self.config.items())}")
        print(table(self.rows), flush=True)
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / f"{self.name}.json"
        content = {
            "name": self.name,
            "config": self.config,
            "commit": commit(),
            "machine": machine.describe().to_json(),
            "rows": self.rows,
        }
        path.write_text(json.dumps(content, indent=1, default=str) + "\n")
        return path


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


def commit() -> str | None:
    """The commit measured, with "+changes" when the tree differs from it (results apart); None outside a repository."""
    head = _git("rev-parse", "--short=12", "HEAD")
    changes = _git("status", "--porcelain", "--", ".", ":!benchmarks/results")
    return head and head + ("+changes" if changes else "")


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
