"""A large diagnosis log: time and peak memory of `eprt diagnose` over it, as text, as JSON and as the page's server.

    python -m benchmarks.bench_log --megabytes 1024 --ranks 16

Writes the log into a temporary directory first, with a late rank in its second half.
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
from pathlib import Path

from eprt.diagnostics.synthetic import Fault, Job, generate, records_of
from eprt.diagnostics.writer import WindowWriter

from benchmarks.report import Report

LATE_RANK, BLOCK = 3, 64  # windows generated at once
COMMAND = (sys.executable, "-m", "eprt.diagnostics")


def write(directory: Path, num_ranks: int, num_bytes: int) -> int:
    """Number of windows written."""
    job = Job(num_ranks, 1, ranks_per_node=max(1, num_ranks // 2))
    line_bytes = sum(len(record.to_line()) for record in records_of(generate(job)))
    num_windows = max(4, num_bytes // line_bytes)
    writer = WindowWriter(directory, max_bytes=num_bytes)
    block = min(BLOCK, num_windows // 4)
    for first in range(0, num_windows, block):
        late = first >= num_windows // 2
        faults = (Fault("column", rank=LATE_RANK, cause="comp", factor=3.0),) if late else ()
        num = min(block, num_windows - first)
        job = Job(num_ranks, num, seed=first, ranks_per_node=max(1, num_ranks // 2), faults=faults)
        for record in records_of(generate(job)):
            shifted = {"window": record.window + first}
            shifted |= {"t_start": record.t_start + 10 * first, "t_end": record.t_end + 10 * first}
            writer.write(type(record)(**{**record.__dict__, **shifted}))
    return num_windows


def run(form: str, directory: Path) -> tuple[float, float]:
    """Seconds and peak resident megabytes. form: --text, --json, or page: until its first analysis is there."""
    started_s = time.perf_counter()
    if form == "page":
        with subprocess.Popen([*COMMAND, str(directory), "--port", "0"], stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            url = process.stdout.readline().split(" on ")[1].split()[0]
            opened_s = time.perf_counter() - started_s
            while get(url, "api/overview")["findings"] is None:
                time.sleep(0.5)
            took_s, peak = time.perf_counter() - started_s, peak_megabytes(process.pid)
            with urllib.request.urlopen(f"{url}api/windows/all") as reply:
                reply.read()
            peak = max(peak, peak_megabytes(process.pid))
            process.send_signal(signal.SIGINT)
        print(f"the page answered after {opened_s:.1f} s", flush=True)
        return took_s, peak
    with subprocess.Popen([*COMMAND, str(directory), form], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        output = process.stdout.read().decode()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 1 or str(LATE_RANK) not in output:
        raise RuntimeError(f"{form}: status {process.returncode}, {output[:500]}")
    return time.perf_counter() - started_s, usage.ru_maxrss / 1024


def get(url: str, path: str):
    with urllib.request.urlopen(url + path, timeout=60) as reply:
        return json.load(reply)


def peak_megabytes(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) / 1024
    return 0.0


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_log")
    parser.add_argument("--megabytes", type=int, default=1024)
    parser.add_argument("--ranks", type=lambda text: [int(n) for n in text.split(",")], default=[8, 64, 256])
    parser.add_argument("--forms", type=lambda text: text.split(","), default=["--text", "--json", "page"])
    arguments = parser.parse_args(argv)
    report = Report("diagnose_log", {"megabytes": arguments.megabytes, "late_rank": LATE_RANK})
    for num_ranks in arguments.ranks:
        with tempfile.TemporaryDirectory(prefix="eprt-log-") as directory:
            num_windows = write(Path(directory), num_ranks, arguments.megabytes << 20)
            size = sum(path.stat().st_size for path in Path(directory).iterdir())
            for form in arguments.forms:
                seconds, peak_mb = run(form, Path(directory))
                report.row(
                    ranks=num_ranks, windows=num_windows, log_mb=round(size / 2**20), form=form,
                    seconds=round(seconds, 1), peak_mb=round(peak_mb), mb_per_s=round(size / 2**20 / seconds, 1),
                )  # fmt: skip
    report.finish()
    return 0


if __name__ == "__main__":
    sys.exit(main())
