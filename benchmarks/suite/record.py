"""The record of a run of tests/gpu: a pytest plugin that notes what every test came to, and its file.

benchmarks/results/gpu_suite.json has the head of every result file (commit, whether the tree was clean, date, machine),
`config` (GPUs, how many ranks shared one, driver, torch, CUDA, and of each half its seconds and whether it ran to its
end), and a row per test:

    {"test": "test_ops.py::test_operator[norms]", "half": "quick", "outcome": "passed", "seconds": 21.4, "why": ""}

The file is written after every test: a run that is stopped leaves what it did, marked as not finished, and the test
that it was at as "stopped". Another run may go on from there (`resume`), and halves may run apart: what the file has of
the same commit and code (`code`, a digest: a tree need not be clean) on the same machine stays. Knows no test.
"""

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

NAME = "gpu_suite"
PREFIX = "tests/gpu/"
# What must be equal for two halves to share one record, beside the commit.
_SAME_MACHINE = ("gpus", "ranks_per_gpu", "driver", "torch", "cuda")


class SuiteRecord:
    """The rows of one half, as a pytest plugin, and those that the file has of the other half.

    Args:
        path: of the file.
        head: of the file: commit, clean, code, date, machine.
        config: gpus (names), ranks_per_gpu, driver, torch, cuda.
        half: "quick" or "long".
        resume: tests of this half that have passed or were skipped keep their rows, and need not run again.
    """

    def __init__(
        self, path: Path, head: Mapping[str, Any], config: Mapping[str, Any], half: str, *, resume: bool = False
    ):
        self.path, self.head, self._half = path, head, half
        earlier = _earlier(path, head, config)
        kept = [
            row
            for row in earlier.get("rows", [])
            if row["half"] != half or (resume and row["outcome"] in ("passed", "skipped"))
        ]
        self.rows: dict[str, dict[str, Any]] = {row["test"]: row for row in kept}
        self.done = [PREFIX + row["test"] for row in kept]  # tests that need not run
        halves = earlier.get("config", {}).get("halves", {})
        self._earlier_s = halves.get(half, {}).get("seconds", 0.0) if resume else 0.0
        self.config = {**config, "halves": {**halves, half: {"seconds": 0.0, "finished": False}}}
        self._started_s = time.monotonic()

    # -- pytest's hooks --

    def pytest_runtest_logreport(self, report: Any) -> None:
        """One phase of a test: setup, call or teardown."""
        self._note(report)

    def pytest_collectreport(self, report: Any) -> None:
        """A file that cannot be imported, or skips itself as a whole."""
        if report.outcome != "passed":
            self._note(report)

    # -- the file --

    def finish(self) -> None:
        self.config["halves"][self._half]["finished"] = True
        self.write()

    def write(self) -> None:
        self.config["halves"][self._half]["seconds"] = round(self._earlier_s + time.monotonic() - self._started_s, 1)
        content = {"name": NAME, "config": self.config, **self.head, "rows": sorted(self.rows.values(), key=_order)}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        aside = self.path.with_suffix(".partial")
        aside.write_text(json.dumps(content, indent=1, default=str) + "\n")
        aside.replace(self.path)

    def count(self, outcome: str) -> int:
        return sum(row["outcome"] == outcome for row in self.rows.values())

    def _note(self, report: Any) -> None:
        test = report.nodeid.removeprefix(PREFIX)
        fresh = {"test": test, "half": self._half, "outcome": "stopped", "seconds": 0.0, "why": ""}
        row = self.rows.setdefault(test, fresh)
        row["seconds"] = round(row["seconds"] + getattr(report, "duration", 0.0), 2)
        if report.outcome != "passed" and row["outcome"] != "failed":
            row["outcome"], row["why"] = report.outcome, why(report)
        elif report.when == "call" and row["outcome"] == "stopped":
            row["outcome"] = "passed"
        self.write()


def why(report: Any) -> str:
    """The reason of a skip; the line that tells of a failure."""
    if isinstance(report.longrepr, tuple | list):
        return str(report.longrepr[2]).removeprefix("Skipped: ")
    crash = getattr(report.longrepr, "reprcrash", None)
    text = crash.message if crash else str(report.longrepr)
    return text.strip().partition("\n")[0][:300]


def _earlier(path: Path, head: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """What the file holds, if it is of the same code on the same machine."""
    content = json.loads(path.read_text()) if path.is_file() else {}
    same = all(content.get(key) == head[key] for key in ("commit", "code"))
    same = same and all(content.get("config", {}).get(key) == config.get(key) for key in _SAME_MACHINE)
    return content if same else {}


def _order(row: Mapping[str, Any]) -> tuple[str, bool, str]:
    return row["test"].partition("::")[0], row["half"] != "quick", row["test"]
