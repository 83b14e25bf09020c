"""A large diagnosis log: processor time and peak memory of `eprt diagnose` over it: text, JSON and the page's server.

    python -m benchmarks.diagnosis.bench_log --megabytes 1024 --ranks 16 --windows 512x30

Writes each log into a temporary directory first, with a late rank in its second half: one of so many megabytes for each
number of ranks, and one of so many ranks x windows.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from eprt.diagnostics.log.events import SCHEMA
from eprt.diagnostics.synthetic import PlantedFault, SyntheticJob, generate, records_of

from benchmarks.tools.report import BenchmarkReport

NUM_RANKS = 0
ON_REQUEST = "writes and reads logs of 3 GB"

LATE_RANK, POOL = 3, 8
COMMAND = (sys.executable, "-m", "eprt.diagnostics")


def write(directory: Path, num_ranks: int, num_bytes: int, num_windows: int | None = None) -> int:
    """Number of windows written; None: as many as make so many bytes. A pool of windows, clean ones and late ones,
    repeats with other numbers and times."""
    late = PlantedFault("column", rank=LATE_RANK, cause="comp", factor=3.0)
    pools = [_lines(num_ranks, ()), _lines(num_ranks, (late,))]
    num_windows = num_windows or max(4, num_bytes // sum(len(line) + 80 for line in pools[0][0]))
    files = [(directory / f"diagnose_rank{rank}.log").open("w") for rank in range(num_ranks)]
    for window in range(num_windows):
        start_s = 1.76e9 + 10 * window
        head = f'{{"schema":"{SCHEMA}","window":{window},"t_start":{start_s},"t_end":{start_s + 10},'
        for file, rest in zip(files, pools[window >= num_windows // 2][window % POOL]):
            file.write(head + rest)
    for file in files:
        file.close()
    return num_windows


def _lines(num_ranks: int, faults: tuple[PlantedFault, ...]) -> list[list[str]]:
    """[window][rank] lines from the field "rank" on."""
    job = SyntheticJob(num_ranks, POOL, ranks_per_node=max(1, num_ranks // 2), faults=faults)
    lines = [record.to_line() for record in records_of(generate(job))]
    rests = [line[line.index('"rank":') :] for line in lines]
    return [rests[k : k + num_ranks] for k in range(0, len(rests), num_ranks)]


def run(form: str, directory: Path) -> tuple[float, float]:
    """Seconds of processor time and peak resident megabytes. form: --text, --json, or page: until its first analysis is
    there and all windows together have been looked at."""
    if form == "page":
        with subprocess.Popen([*COMMAND, str(directory), "--port", "0"], stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            url = next(word for word in process.stdout.readline().split() if word.startswith("http"))
            while get(url, "api/overview")["findings"] is None:
                time.sleep(0.5)
            with urllib.request.urlopen(f"{url}api/windows/all") as reply:
                reply.read()
            process.send_signal(signal.SIGINT)
            usage = used(process)
        return usage
    with subprocess.Popen([*COMMAND, str(directory), form], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        output = process.stdout.read().decode()
        usage = used(process)
    if process.returncode != 1 or str(LATE_RANK) not in output:
        raise RuntimeError(f"{form}: status {process.returncode}, {output[:500]}")
    return usage


def used(process: subprocess.Popen) -> tuple[float, float]:
    """Waits for its end; seconds of processor time and peak resident megabytes."""
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    return usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024


def get(url: str, path: str):
    with urllib.request.urlopen(url + path, timeout=60) as reply:
        return json.load(reply)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.diagnosis.bench_log")
    parser.add_argument("--megabytes", type=int, default=1024)
    parser.add_argument("--ranks", type=lambda text: [int(n) for n in text.split(",")], default=[8, 64, 256])
    parser.add_argument("--windows", metavar="RANKSxWINDOWS", default="512x30")
    parser.add_argument("--forms", type=lambda text: text.split(","), default=["--text", "--json", "page"])
    arguments = parser.parse_args(argv)
    report = BenchmarkReport("diagnose_log", {"megabytes": arguments.megabytes, "late_rank": LATE_RANK})
    short = tuple(int(number) for number in arguments.windows.split("x"))
    for num_ranks, windows in (*((num_ranks, None) for num_ranks in arguments.ranks), short):
        with tempfile.TemporaryDirectory(prefix="eprt-log-") as directory:
            with ProcessPoolExecutor(1, get_context("spawn")) as writer:  # a child's peak begins with its parent's size
                num_windows = writer.submit(
                    write, Path(directory), num_ranks, arguments.megabytes << 20, windows
                ).result()
            size = sum(path.stat().st_size for path in Path(directory).iterdir())
            for form in arguments.forms:
                seconds, peak_mb = run(form, Path(directory))
                report.add_row(
                    ranks=num_ranks,
                    windows=num_windows,
                    log_mb=round(size / 2**20),
                    form=form,
                    cpu_s=round(seconds, 1),
                    peak_mb=round(peak_mb),
                    mb_per_s=round(size / 2**20 / seconds, 1),
                )
    report.finish()
    return 0


if __name__ == "__main__":
    sys.exit(main())
