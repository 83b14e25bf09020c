"""The catalogue of benchmarks: every module of this folder's rooms that says what it needs, read without importing it.

A benchmark is a module with these constants at its top:

    NUM_RANKS    0: one process; n: mpirun starts n ranks; a tuple: once for each (each names its report by the count)
    NAME         what `eprt bench` calls it too; default: the module's name alone
    NEEDS_GPU    default False
    NEEDS        what else must be there: a peer, a server that runs, arguments
    ON_REQUEST   why `eprt bench` without names leaves it out, although it needs no GPU

This module knows no benchmark and runs none.
"""

import ast
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1]
CONSTANTS = ("NUM_RANKS", "NAME", "NEEDS_GPU", "NEEDS", "ON_REQUEST")


@dataclass(frozen=True)
class Benchmark:
    """One benchmark, as `eprt bench --list` shows it."""

    name: str  # shown in the list
    module: str  # dotted; its last word is a name too
    num_ranks: tuple[int, ...]  # 0: no mpirun
    needs_gpu: bool
    needs: str
    on_request: str  # empty: it runs by default where it needs no GPU
    summary: str  # first line of the module's docstring

    def commands(self, flags: list[str]) -> list[list[str]]:
        python = [sys.executable, "-m", self.module, *flags]
        return [["mpirun", "-n", str(n), *python] if n else python for n in self.num_ranks]

    @property
    def by_default(self) -> bool:
        return not self.needs_gpu and not self.on_request

    def line(self) -> str:
        """What it needs, then what it does."""
        counts = "/".join(map(str, self.num_ranks))
        ranks = f"{counts} ranks" if any(self.num_ranks) else "1 process"
        notes = "; ".join(filter(None, (self.needs, self.on_request)))
        where = "GPU" if self.needs_gpu else "CPU"
        return f"{self.name:21} {where}  {ranks:11}  {self.summary}{f' [{notes}]' if notes else ''}"


def by_name(benchmarks: Sequence[Benchmark]) -> dict[str, Benchmark]:
    return {name: one for one in benchmarks for name in (one.name, one.module.rpartition(".")[2])}


def find(folder: Path = FOLDER) -> list[Benchmark]:
    """All benchmarks, by folder and name. A module that cannot be imported here is listed too."""
    return [found for path in sorted(folder.glob("*/*.py")) if (found := read(path)) is not None]


def read(path: Path) -> Benchmark | None:
    """None: not a benchmark."""
    tree = ast.parse(path.read_text(), str(path))
    constants = dict(_constants(tree))
    if "NUM_RANKS" not in constants:
        return None
    ranks = constants["NUM_RANKS"]
    return Benchmark(
        name=constants.get("NAME", path.stem),
        module=f"benchmarks.{path.parent.name}.{path.stem}",
        num_ranks=ranks if isinstance(ranks, tuple) else (ranks,),
        needs_gpu=constants.get("NEEDS_GPU", False),
        needs=constants.get("NEEDS", ""),
        on_request=constants.get("ON_REQUEST", ""),
        summary=(ast.get_docstring(tree) or "").partition("\n")[0],
    )


def _constants(tree: ast.Module) -> Iterator[tuple[str, object]]:
    for node in tree.body:
        target = node.targets[0] if isinstance(node, ast.Assign) else None
        if isinstance(node, ast.Assign) and isinstance(target, ast.Name) and target.id in CONSTANTS:
            yield target.id, ast.literal_eval(node.value)
