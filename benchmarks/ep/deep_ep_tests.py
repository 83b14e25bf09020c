"""DeepEP's own tests through eprt's interface of DeepEP, and through DeepEP itself where it is installed.

    eprt bench deep_ep_tests -- DEEP_EP/tests --ranks 4

Runs test_intranode.py and test_low_latency.py of a checkout of DeepEP V1 (github.com/deepseek-ai/DeepEP) unchanged;
only `import deep_ep` finds eprt.compat.deep_ep (eprt/compat/redirect). A test that fails ends the run with its output.
The report has the figures that the tests print, of the slowest rank. The programs run one after another: bench_ep times
both alternately in one process.
"""

import argparse
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

from benchmarks.tools.report import ROOT, BenchmarkReport
from eprt import env

NUM_RANKS = 0
NEEDS_GPU = True
NEEDS = "the tests of a DeepEP V1 checkout"

FIGURES = {
    "test_intranode.py": {
        "layout_us": (r"\[layout\] Kernel performance: ([\d.]+) ms", 1e3),
        "dispatch_fp8_us": (r"Best dispatch \(FP8\).* t: ([\d.]+) us", 1),
        "dispatch_bf16_us": (r"Best dispatch \(BF16\).* t: ([\d.]+) us", 1),
        "combine_bf16_us": (r"Best combine.* t: ([\d.]+) us", 1),
    },
    "test_low_latency.py": {
        "dispatch_us": (r"Dispatch bandwidth: [\d.]+ GB/s, avg_t=([\d.]+) us", 1),
        "combine_us": (r"Combine bandwidth: [\d.]+ GB/s, avg_t=([\d.]+) us", 1),
        "pair_us": (r"Dispatch \+ combine bandwidth: [\d.]+ GB/s, avg_t=([\d.]+) us", 1),
        "hook_dispatch_send_us": (r"Dispatch send/recv time: ([\d.]+) \+", 1),
        "hook_dispatch_recv_us": (r"Dispatch send/recv time: [\d.]+ \+ ([\d.]+) us", 1),
        "hook_combine_send_us": (r"Combine send/recv time: ([\d.]+) \+", 1),
        "hook_combine_recv_us": (r"Combine send/recv time: [\d.]+ \+ ([\d.]+) us", 1),
    },
}


def run(tests: Path, test: str, num_ranks: int, face: bool) -> str:
    """What the test prints. Exits with that when it fails."""
    paths = [tests / "..", tests, *map(Path, sys.path)]
    if face:
        paths = [ROOT / "eprt" / "compat" / "redirect", ROOT, tests, *map(Path, sys.path)]
    environment = env.without_mpi() | {"PYTHONPATH": os.pathsep.join(map(str, paths)), "PYTHONUNBUFFERED": "1"}
    done = subprocess.run(
        [sys.executable, test, "--num-processes", str(num_ranks)],
        cwd=tests,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=300,
        check=False,
    )
    if done.returncode:
        sys.exit(f"{test} of {num_ranks} ranks, {'eprt' if face else 'DeepEP'}, failed:\n{done.stdout}")
    return done.stdout


def figures(test: str, text: str) -> dict[str, float]:
    """Those that the test printed, the largest over the ranks."""
    found = {}
    for name, (pattern, scale) in FIGURES[test].items():
        values = [float(value) * scale for value in re.findall(pattern, text)]
        if values:
            found[name] = max(values)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("tests", type=Path, help="the folder of DeepEP's tests")
    parser.add_argument("--ranks", type=int, default=2)
    arguments = parser.parse_args()
    tests = arguments.tests.resolve()
    report = BenchmarkReport(f"deep_ep_tests_{arguments.ranks}gpu", {"ranks": arguments.ranks})
    peer = importlib.util.find_spec("deep_ep") is not None
    for test in FIGURES:
        ours = figures(test, run(tests, test, arguments.ranks, face=True))
        theirs = figures(test, run(tests, test, arguments.ranks, face=False)) if peer else {}
        for name, us in ours.items():
            row = {"test": test, "figure": name, "eprt": us}
            if name in theirs:
                row |= {"deep_ep": theirs[name], "ratio": us / theirs[name]}
            report.add_row(**row)
    print(report.finish())


if __name__ == "__main__":
    main()
