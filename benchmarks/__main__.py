"""python -m benchmarks [NAME ...]: runs every benchmark that needs no GPU (make bench), or the named ones.

A benchmark is a module of this folder with a constant NUM_RANKS: 0 to be run as plain `python -m benchmarks.NAME`,
n to be run under `mpirun -n n`, a tuple to be run once for each (its Report is then named after the count, too).
NEEDS_GPU = True leaves it out of the default list.
"""

import argparse
import ast
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.tools.report import RESULTS, ROOT
from eprt import env
from eprt.mpirun import mpirun_command


@dataclass(frozen=True)
class Benchmark:
    name: str
    num_ranks: tuple[int, ...]
    needs_gpu: bool
    summary: str

    def commands(self) -> list[list[str]]:
        python = [sys.executable, "-m", f"benchmarks.{self.name}"]
        return [["mpirun", "-n", str(n), *python] if n else python for n in self.num_ranks]


def find(folder: Path = Path(__file__).parent) -> list[Benchmark]:
    """All benchmarks, by reading their constants: a module that cannot be imported here is still listed."""
    found = []
    for path in sorted(folder.glob("*.py")):
        tree = ast.parse(path.read_text(), str(path))
        assigned = [node for node in tree.body if isinstance(node, ast.Assign) and len(node.targets) == 1]
        names = {node.targets[0].id: node.value for node in assigned if isinstance(node.targets[0], ast.Name)}
        constants = {name: ast.literal_eval(names[name]) for name in ("NUM_RANKS", "NEEDS_GPU") if name in names}
        if "NUM_RANKS" in constants:
            ranks = constants["NUM_RANKS"]
            summary = (ast.get_docstring(tree) or "").partition("\n")[0]
            ranks = ranks if isinstance(ranks, tuple) else (ranks,)
            found.append(Benchmark(path.stem, ranks, constants.get("NEEDS_GPU", False), summary))
    return found


# With flags of their own: word: one line.
APART = {
    "serve": "Open-loop load on a server that runs already: latency and goodput (eprt bench serve --help).",
    "layer": "One MoE layer with and without overlap, and its timeline (eprt bench layer --help).",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 0, or 1 when a benchmark failed (the others still run)."""
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["serve"]:
        from benchmarks import open_loop

        return open_loop.main(argv[1:])
    if argv[:1] == ["layer"]:
        return _bench_layer(argv[1:])
    parser = argparse.ArgumentParser(
        prog="eprt bench",
        description="Runs benchmarks; prints tables here, writes JSON to benchmarks/results. `eprt bench serve` is "
        "apart: open-loop load on a server that runs already; so is `eprt bench layer -n N`: one MoE layer with and "
        "without overlap, and its timeline; see their --help.",
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="default: all that need no GPU")
    parser.add_argument("--list", action="store_true", help="only list them")
    parser.add_argument(
        "--timeout-s", type=float, default=900, metavar="S", help="deadline of one, default %(default)s"
    )
    arguments = parser.parse_args(argv)
    known = {benchmark.name: benchmark for benchmark in find()}
    unknown = [name for name in arguments.names if name not in known]
    if unknown:
        there_are = f"{', '.join(known)}, and {', '.join(APART)} with flags of their own"
        parser.error(f"no benchmark {', '.join(unknown)}; there are {there_are}")
    chosen = [known[name] for name in arguments.names] or [b for b in known.values() if not b.needs_gpu]
    if arguments.list:
        for benchmark in known.values():
            ranks = f"{'/'.join(map(str, benchmark.num_ranks))} ranks" if any(benchmark.num_ranks) else "1 process"
            print(f"{benchmark.name:21} {'GPU' if benchmark.needs_gpu else 'CPU'}  {ranks:11}  {benchmark.summary}")
        for word, summary in APART.items():
            print(f"{word:21} {'':17} {summary}")
        return 0
    failed = [benchmark.name for benchmark in chosen if not _run(benchmark, arguments.timeout_s)]
    print(f"\nresults in {RESULTS.relative_to(ROOT)}/" + (f"; failed: {', '.join(failed)}" if failed else ""))
    return 1 if failed else 0


def _bench_layer(argv: Sequence[str]) -> int:
    """On as many ranks as asked for, GPUs where there are some."""
    from benchmarks.serving.bench_layer import parse

    ranks = parse(list(argv)).ranks or 2
    command = mpirun_command("-n", str(ranks), sys.executable, "-m", "benchmarks.serving.bench_layer", *argv)
    environment = {"OMP_NUM_THREADS": "1", **env.mpi_environment()}
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


def _run(benchmark: Benchmark, timeout_s: float) -> bool:
    for command in benchmark.commands():
        print(f"\n== {benchmark.name}: {' '.join(command)}", flush=True)
        start = time.monotonic()
        try:
            environment = None
            if command[0] == "mpirun":
                command, environment = mpirun_command(*command[1:]), {"OMP_NUM_THREADS": "1", **env.mpi_environment()}
            done = subprocess.run(command, cwd=ROOT, env=environment, timeout=timeout_s, check=False)
        except subprocess.TimeoutExpired:
            print(f"== {benchmark.name}: not done after {timeout_s:.0f} s, stopped", file=sys.stderr)
            return False
        except FileNotFoundError:
            print("== mpirun was not found; `eprt env` says how to get it", file=sys.stderr)
            return False
        if done.returncode != 0:
            print(f"== {benchmark.name}: exit status {done.returncode}", file=sys.stderr)
            return False
        print(f"== {benchmark.name}: {time.monotonic() - start:.1f} s", flush=True)
    return True


if __name__ == "__main__":
    sys.exit(main())
