"""How each result file was measured, and whether it is of this code (figures/results.toml, heads of the files).

This module knows no benchmark; provenance.py asks git.
"""

import json
import tomllib
from dataclasses import dataclass
from pathlib import Path

from benchmarks.tools import provenance
from benchmarks.tools.report import RESULTS, ROOT

TABLE = ROOT / "benchmarks" / "figures" / "results.toml"


@dataclass(frozen=True)
class Measured:
    """One result file."""

    name: str
    command: str  # that writes it
    needs: str  # beside `make build`
    code: tuple[str, ...]  # files and folders whose change makes it old
    simulated: bool
    pending: str  # what it waits for to be measured again; empty: nothing

    @property
    def path(self) -> Path:
        return RESULTS / f"{self.name}.json"

    def why_old(self) -> str | None:
        """Why its figures are not those of this code; None when they are."""
        content = json.loads(self.path.read_text())
        commit, _, changes = (content.get("commit") or "").partition("+")
        if not commit:
            return "it does not say which commit was measured"
        if not provenance.is_in_history(commit):
            return f"commit {commit[:12]} is not in the history"
        if changes or not content.get("clean", True):
            return f"the tree that was measured differs from commit {commit[:12]}"
        if changed := provenance.changed_since(commit, self.code):
            return f"{len(changed)} files of what it measures changed since commit {commit[:12]}: {changed[0]}, ..."
        return None


def load(table: Path = TABLE) -> dict[str, Measured]:
    """By name."""
    content = tomllib.loads(table.read_text())
    pending = {name: reason for reason, names in content["pending"].items() for name in names}
    files = {}
    for entry in content["measured"]:
        code = tuple(path for group in entry["code"] for path in content["code"][group])
        for name in entry["files"]:
            simulated = entry.get("simulated", False)
            waits = pending.get(name, "")
            files[name] = Measured(name, entry["command"], entry["needs"], code, simulated, waits)
    return files
