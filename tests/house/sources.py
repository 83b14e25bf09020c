"""The project's sources as the house tests see them: files, imports, and the graphs that imports make."""

import ast
import functools
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("eprt", "balancer", "diagnostics")


def repository_files(*suffixes: str) -> list[Path]:
    """Tracked and new files, without what git ignores; every file where there is no git (an unpacked archive)."""
    git = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if git.returncode == 0:
        files = [ROOT / name for name in git.stdout.splitlines()]
    else:
        skipped = {".venv", "build", "dist", ".git"}
        files = [path for path in ROOT.rglob("*") if not skipped & set(path.relative_to(ROOT).parts)]
    return sorted(path for path in files if path.is_file() and (not suffixes or path.suffix in suffixes))


def python_files(*folders: str) -> list[Path]:
    files = [path for path in repository_files(".py") if not folders or path.relative_to(ROOT).parts[0] in folders]
    assert files, folders
    return files


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@functools.cache
def nodes(text: str) -> tuple[ast.AST, ...]:
    """Of a source's syntax tree, which the tests only read."""
    return tuple(ast.walk(ast.parse(text)))


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """(line, dotted module) of every import in the file, those inside functions included; relative ones resolved.

    `from eprt.ops import linear` gives eprt.ops.linear, whether linear is a module or a name in it.
    """
    package = ".".join(path.relative_to(ROOT).parent.parts)
    for node in nodes(path.read_text()):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package.split(".")[: len(package.split(".")) - node.level + 1]) if node.level else ""
            module = ".".join(filter(None, (base, node.module)))
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)


def module_path(dotted: str) -> tuple[str, ...] | None:
    """The module of this project that a dotted name means or lies in, as path parts; None for other projects' names.

    eprt.balancer is installed from balancer/, so both spellings give ("balancer", ...). A package is its __init__.
    """
    words = dotted.split(".")
    if words[:2] in (["eprt", "balancer"], ["eprt", "diagnostics"]):
        words = words[1:]
    if words[0] not in PACKAGES:
        return None
    for length in range(len(words), 0, -1):
        path = ROOT.joinpath(*words[:length])
        if path.with_suffix(".py").is_file():
            return (*words[: length - 1], words[length - 1])
        if (path / "__init__.py").is_file():
            return (*words[:length], "__init__")
    return None


def module_graph() -> dict[tuple[str, ...], set[tuple[str, ...]]]:
    """Who imports whom, by path parts, imports inside functions included.

    eprt/__init__ is left out: it is the door, whose names are looked up when they are asked for.
    """
    graph = {}
    for path in python_files(*PACKAGES):
        own = path.relative_to(ROOT).with_suffix("").parts
        if own == ("eprt", "__init__"):
            continue
        targets = {module_path(dotted) for _, dotted in imports(path)}
        graph[own] = {target for target in targets if target not in (None, own, ("eprt", "__init__"))}
    return graph


def cycle(graph: Mapping) -> list | None:
    """One closed walk along the arrows, first node last again; None where there is none."""
    done: set = set()
    for start in graph:
        trail: list = []
        pending = [(start, iter(graph.get(start, ())))]
        while pending:
            node, targets = pending[-1]
            if node not in trail:
                trail.append(node)
            for target in targets:
                if target in trail:
                    return [*trail[trail.index(target) :], target]
                if target not in done:
                    pending.append((target, iter(graph.get(target, ()))))
                    break
            else:
                pending.pop()
                trail.pop()
                done.add(node)
    return None
