"""The tables of docs/gpu.md that are made from the record of `make test-gpu` (benchmarks/figures/gpu_suite.toml).

Knows the record's columns, and of tests the first line that their files say of themselves.
"""

import ast
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.tools.report import ROOT

TESTS = ROOT / "tests" / "gpu"


def run_table(content: Mapping[str, Any]) -> str:
    """When and where the tests ran."""
    config = content["config"]
    rows = [("commit", _commit(content)), ("date", content["date"] or "-")]
    if config:
        gpus = [f"{count} {name}" for name, count in Counter(config["gpus"]).items()]
        libraries = f"driver {config['driver']}, CUDA {config['cuda']}, torch {config['torch']}"
        rows += [("GPUs", ", ".join(gpus)), ("with", libraries)]
        if (ranks := config.get("ranks_per_gpu", 1)) > 1:
            rows.append(("ranks", f"up to {ranks} shared a GPU, which took turns among them: nothing went over NVLink"))
        rows += [(f"{name} half", _seconds(half)) for name, half in config["halves"].items()]
    return _markdown(("run", "of `make test-gpu`"), rows)


def file_table(content: Mapping[str, Any], tests: Path = TESTS) -> str:
    """A row for each file and half: how many tests passed, and those that did not."""
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in content["rows"]:
        groups.setdefault((row["test"].partition("::")[0], row["half"]), []).append(row)
    head = ("file", "what", "half", "passed", "failed", "skipped", "seconds")
    rows = [
        (
            f"`{file}`",
            _summary(tests / file),
            half,
            str(_count(group, "passed")),
            _failed(group),
            _skipped(group),
            f"{sum(row['seconds'] for row in group):.0f}",
        )
        for (file, half), group in groups.items()
    ]
    return _markdown(head, rows)


def _commit(content: Mapping[str, Any]) -> str:
    if not content["commit"]:
        return "not run since records are kept"
    return f"`{content['commit'][:12]}`" + ("" if content["clean"] else " with changes that are not committed")


def _seconds(half: Mapping[str, Any]) -> str:
    return f"{half['seconds']:.0f} s" + ("" if half["finished"] else ", stopped before its end")


def _summary(path: Path) -> str:
    """What the file says of itself, up to the first full stop."""
    docstring = ast.get_docstring(ast.parse(path.read_text())) if path.is_file() else None
    return (docstring or "(gone)").partition("\n\n")[0].replace("\n", " ").rstrip(".").replace("|", "/")


def _count(group: Sequence[Mapping[str, Any]], outcome: str) -> int:
    return sum(row["outcome"] == outcome for row in group)


def _failed(group: Sequence[Mapping[str, Any]]) -> str:
    """Those that failed; behind them those that were under way when the run was stopped."""
    wrong = _named(row for row in group if row["outcome"] not in ("passed", "skipped", "stopped"))
    stopped = _named(row for row in group if row["outcome"] == "stopped")
    return f"{wrong}; stopped: {stopped}" if stopped != "0" else wrong


def _named(rows: Iterable[Mapping[str, Any]]) -> str:
    names = [f"`{row['test'].partition('::')[2] or row['test']}`" for row in rows]
    return f"{len(names)}: {', '.join(names)}" if names else "0"


def _skipped(group: Sequence[Mapping[str, Any]]) -> str:
    reasons = Counter(row["why"].replace("|", "/") for row in group if row["outcome"] == "skipped")
    return "; ".join(f"{count}: {why}" for why, count in reasons.items()) or "0"


def _markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows))
