"""Runs the tests of tests/gpu on the GPUs that are there and writes benchmarks/results/gpu_suite.json.

    make test-gpu                         both halves
    make test-gpu HALF=quick              every kernel, both modes, graphs, overlap, a model, a server, a killed rank
    make test-gpu HALF=long               10,000 epochs, sanitizers, and all that is not in the quick half
    make test-gpu ARGS=--resume           leaves out what has passed, by the record, at this commit on these GPUs
    make test-gpu ARGS="-k low_latency"   some tests, by pytest's arguments: no record is written
    make test-gpu ARGS="--ranks-per-gpu 4"   tests of more ranks than GPUs, too (tests/gpu/shared.py), which it records

Tests of one GPU run first, several at a time on every GPU, while the exchange's kernels are compiled; then the others,
one after another. Where there is no repository (a copy of the sources) BENCHMARK_COMMIT names the commit, with
"+changes" behind it if the tree differs from it. Knows no test.
"""

import argparse
import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.suite.record import NAME, SuiteRecord
from benchmarks.tools import measured, provenance
from benchmarks.tools.report import RESULTS, ROOT, measured_here
from eprt import env

NUM_RANKS = 0
NEEDS_GPU = True

# Compiling takes most of the time of the small tests: two processes share a GPU, more where there are cores for them.
WORKERS_PER_GPU, MOST_WORKERS_PER_GPU, CORES_OF_WORKER = 2, 6, 2
# Tests of several ranks that share one GPU, most of whose time is the start of processes.
SHARING_WORKERS = 3
OK, INTERRUPTED, NO_TESTS = 0, 2, 5  # pytest.ExitCode
HALVES = {"quick": "not long", "long": "long"}  # and what chooses their tests
_NO_COMMIT = (
    "no commit is known: this is not a git repository, and BENCHMARK_COMMIT is not set "
    "(make test-gpu BENCHMARK_COMMIT=$(git rev-parse HEAD), with +changes behind it if the tree differs)"
)


def main(argv: Sequence[str] | None = None) -> int:
    """0: no test failed. 1: some did. 2: nothing was run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--half", choices=[*HALVES, "all"], default="all", help="default: %(default)s")
    parser.add_argument("--directory", type=Path, default=RESULTS, help="of the record; default: benchmarks/results")
    parser.add_argument("--resume", action="store_true", help="leave out the tests that the record has as passed")
    parser.add_argument("--seconds", type=float, help="stop after so many; what ran by then stays in the record")
    parser.add_argument(
        "--ranks-per-gpu",
        type=int,
        default=env.get("EPRT_RANKS_PER_GPU"),
        help="so many ranks share a GPU, which takes turns among them (default: %(default)s)",
    )
    parser.add_argument("--age", action="store_true", help="run nothing: warn if the record is not of this code")
    arguments, for_pytest = parser.parse_known_args(argv)
    if arguments.age:
        if warning := age_warning():
            print(warning, file=sys.stderr)
        return 0
    if not for_pytest and provenance.measured_commit()[0] is None:
        print(_NO_COMMIT, file=sys.stderr)
        return 2
    if arguments.ranks_per_gpu < 1:
        parser.error(f"--ranks-per-gpu {arguments.ranks_per_gpu}: must be at least 1")
    gpus = {**describe_gpus(), "ranks_per_gpu": arguments.ranks_per_gpu}
    if not gpus["gpus"]:
        print("tests/gpu needs an NVIDIA GPU that torch can use, and there is none: `eprt env`", file=sys.stderr)
        return 2
    if arguments.seconds is not None:
        stop_after(arguments.seconds)
    halves = list(HALVES) if arguments.half == "all" else [arguments.half]
    # For all processes that tests start.
    os.environ["EPRT_RANKS_PER_GPU"] = str(arguments.ranks_per_gpu)
    if for_pytest:
        return run_part(halves, for_pytest, len(gpus["gpus"]), arguments.ranks_per_gpu)
    return run(halves, arguments.directory / f"{NAME}.json", gpus, arguments.resume)


def age_warning() -> str | None:
    """One line if the record is not of this code. `make lint` prints it: GPUs are not always there to mend it."""
    if not provenance.has_history():
        return None
    why = measured.load()[NAME].why_old()
    return why and f"warning: benchmarks/results/{NAME}.json: {why}; run `make test-gpu` where there are GPUs"


def describe_gpus() -> dict[str, Any]:
    import torch

    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {"gpus": names, "driver": driver_version(), "torch": torch.__version__, "cuda": torch.version.cuda}


def driver_version() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.partition("\n")[0].strip() if done.returncode == 0 else ""


def run(halves: Sequence[str], path: Path, gpus: dict[str, Any], resume: bool) -> int:
    """One half after the other, with a record. path: of its file."""
    head, failed = {**measured_here(), "code": provenance.code_digest()}, False
    num_gpus, ranks_per_gpu = len(gpus["gpus"]), gpus["ranks_per_gpu"]
    with kernels_compiled_ahead(num_gpus * ranks_per_gpu):
        for half in halves:
            record = SuiteRecord(path, head, gpus, half, resume=resume)
            for phase in phases(half, num_gpus, ranks_per_gpu):
                status = run_pytest(phase, num_gpus, record)
                failed |= has_failed(status)
                if status == INTERRUPTED:
                    print(f"{path}: the {half} half was stopped", file=sys.stderr)
                    return 1
            if not any(row["outcome"] == "stopped" for row in record.rows.values()):
                record.finish()
            counts = ", ".join(f"{record.count(outcome)} {outcome}" for outcome in ("passed", "failed", "skipped"))
            print(f"{path}: {counts}", flush=True)
    return int(failed)


def run_part(halves: Sequence[str], for_pytest: Sequence[str], num_gpus: int, ranks_per_gpu: int) -> int:
    """The tests that pytest's arguments choose, without a record."""
    failed = False
    for half in halves:
        for phase in phases(half, num_gpus, ranks_per_gpu):
            status = run_pytest([*phase, *for_pytest], num_gpus)
            failed |= has_failed(status)
            if status == INTERRUPTED:
                return 1
    print("no record is written for a part of a half")
    return int(failed)


@contextlib.contextmanager
def kernels_compiled_ahead(num_ranks: int) -> Iterator[None]:
    """The exchange's kernels, beside what runs in the block."""
    ahead = subprocess.Popen([sys.executable, "-m", "tests.gpu.ahead", *map(str, sorted({1, num_ranks}))], cwd=ROOT)
    try:
        yield
    finally:
        ahead.terminate()
        ahead.wait()


def phases(half: str, num_gpus: int, ranks_per_gpu: int = 1) -> list[list[str]]:
    """pytest's arguments, one run after the other: tests of one GPU side by side, then the others."""
    several = importlib.util.find_spec("xdist") is not None
    per_gpu = min(MOST_WORKERS_PER_GPU, (os.cpu_count() or 1) // (CORES_OF_WORKER * num_gpus))
    alone = ["-n", str(max(WORKERS_PER_GPU, per_gpu) * num_gpus)] if several else []
    together = ["-n", str(SHARING_WORKERS), "--maxschedchunk", "1"] if several and num_gpus == 1 < ranks_per_gpu else []
    return [[*alone, "-m", f"one_gpu and {HALVES[half]}"], [*together, "-m", f"not one_gpu and {HALVES[half]}"]]


def stop_after(seconds: float) -> None:
    """As Ctrl-C would, also where a shell has started this in the background and thereby made it deaf to that."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT))
    timer.daemon = True
    timer.start()


def run_pytest(arguments: Sequence[str], num_gpus: int, record: SuiteRecord | None = None) -> int:
    """pytest's exit status."""
    import pytest

    # For tests/gpu/conftest.py, also in the processes that pytest starts.
    os.environ["GPU_SUITE_GPUS"] = str(num_gpus)
    os.environ["GPU_SUITE_DONE"] = json.dumps(record.done if record else [])
    plugins = [record] if record else []
    return int(pytest.main([str(ROOT / "tests" / "gpu"), "-p", "no:cacheprovider", *arguments], plugins=plugins))


def has_failed(status: int) -> bool:
    return status not in (OK, NO_TESTS)


if __name__ == "__main__":
    sys.exit(main())
