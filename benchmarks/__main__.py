"""python -m benchmarks [NAME ...]: runs the named benchmarks, or all that run by default (make bench).

    python -m benchmarks --list
    python -m benchmarks bench_ep_cpu bench_scheduler
    python -m benchmarks bench_balance -- --eplb eplb.py      flags behind -- are the benchmark's own

`serve` and `layer` take their flags without the --. Tables are printed; JSON goes to benchmarks/results.
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence

from benchmarks.tools import catalogue
from benchmarks.tools.catalogue import Benchmark
from benchmarks.tools.report import RESULTS, ROOT
from eprt import env
from eprt.mpirun import mpirun_command

_LONGEST_S = 1e6


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 0, or 1 when a benchmark failed (the others still run)."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if argv[:1] == ["serve"]:
        from benchmarks.serving import open_loop

        return open_loop.main(argv[1:])
    if argv[:1] == ["layer"]:
        return _bench_layer(argv[1:])
    parser = _parser()
    own, separator, flags = _split(argv)
    arguments = parser.parse_args(own)
    if not 0 < arguments.timeout_s < _LONGEST_S:
        parser.error(f"--timeout-s {arguments.timeout_s:g}: must be above 0 and below {_LONGEST_S:g}")
    everything = catalogue.find()
    known = catalogue.by_name(everything)
    unknown = [name for name in arguments.names if name not in known]
    if unknown:
        parser.error(f"no benchmark {', '.join(unknown)}; there are {', '.join(one.name for one in everything)}")
    if separator and len(arguments.names) != 1:
        parser.error("flags behind -- are for one benchmark: name it before them")
    if arguments.list:
        print("\n".join(one.line() for one in everything))
        return 0
    chosen = [known[name] for name in arguments.names] or [one for one in everything if one.by_default]
    failed = [one.name for one in chosen if not _run(one, flags, arguments.timeout_s)]
    print(f"\nresults in {RESULTS.relative_to(ROOT)}/" + (f"; failed: {', '.join(failed)}" if failed else ""))
    if not arguments.names:
        left_out = [f"{one.name} ({one.on_request})" for one in everything if one.on_request and not one.needs_gpu]
        print(f"left out, by name only: {', '.join(left_out)}")
    return 1 if failed else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="eprt bench",
        description="Runs benchmarks; prints tables here, writes JSON to benchmarks/results. Flags behind -- go to the "
        "one benchmark named before them. `eprt bench serve` is apart: open-loop load on a server that runs already; "
        "so is `eprt bench layer -n N`: one MoE layer with and without overlap, and its timeline; see their --help.",
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="default: all that need no GPU and take minutes")
    parser.add_argument("--list", action="store_true", help="only list them, with what each needs")
    parser.add_argument(
        "--timeout-s", type=float, default=900, metavar="S", help="deadline of one, default %(default)s"
    )
    return parser


def _split(argv: list[str]) -> tuple[list[str], bool, list[str]]:
    """What stands before --, whether there is one, and what stands behind it."""
    if "--" not in argv:
        return argv, False, []
    at = argv.index("--")
    return argv[:at], True, argv[at + 1 :]


def _bench_layer(argv: Sequence[str]) -> int:
    """On as many ranks as asked for, GPUs where there are some."""
    from benchmarks.serving.bench_layer import parse

    ranks = parse(list(argv)).ranks or 2
    command = mpirun_command("-n", str(ranks), sys.executable, "-m", "benchmarks.serving.bench_layer", *argv)
    environment = {"OMP_NUM_THREADS": "1", **env.mpi_environment()}
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


def _run(benchmark: Benchmark, flags: list[str], timeout_s: float) -> bool:
    for command in benchmark.commands(flags):
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
