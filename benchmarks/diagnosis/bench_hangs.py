"""Ranks of a loaded server that are stopped (SIGSTOP): how soon the diagnosis names them, and whom else it names.

    python -m benchmarks.diagnosis.bench_hangs [--trials 20] [--ranks 2 3 4]

A server of CPU ranks decodes. One rank after the other is stopped; /health and /v1/eprt/diagnose are asked ten times a
second until they name it, then it goes on. A heartbeat comes twice a second, so the second missed one is at most a
second after the stop. Between the trials, and in a calm time at the beginning, nobody may be named. At last the log is
read: each trial must be one hang of the right rank.
"""

import argparse
import contextlib
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any

import httpx
from eprt.diagnostics import analyse

from benchmarks.diagnosis.live_faults import SteadyLoad
from benchmarks.shapes import DEMO_MODEL
from benchmarks.tools.report import BenchmarkReport
from eprt.serve.ranks.heartbeat import BEAT_S
from eprt.serve.running import RunningServer

NUM_RANKS = 0
ON_REQUEST = "takes 4 minutes"

WITHIN_S = 3.0  # of the second missed heartbeat
_POLL_S, _GIVE_UP_S, _CALM_S = 0.1, 15.0, 20.0


@contextlib.contextmanager
def _stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


class Watched:
    """One server, asked again and again."""

    def __init__(self, url: str):
        self._http = httpx.Client(base_url=url, timeout=30)
        self.pids = {rank["rank"]: rank["pid"] for rank in self._http.get("/health").json()["ranks"]}

    def hanging(self) -> tuple[str, list[int]]:
        """The reason that /health gives, and the ranks of the findings."""
        health, findings = self._http.get("/health").json(), self._http.get("/v1/eprt/diagnose").json()["findings"]
        return health["reason"], [f["rank"] for f in findings if f["kind"] == "hang" and f["active"]]

    def calm(self, seconds: float) -> int:
        """How often anybody was named in this time."""
        end_s, num_named = time.monotonic() + seconds, 0
        while time.monotonic() < end_s:
            num_named += bool(self.hanging()[1])
            time.sleep(_POLL_S)
        return num_named

    def trial(self, culprit: int) -> dict[str, Any]:
        """Stops a rank until it is named."""
        wrong: set[int] = set()
        with _stopped(self.pids[culprit]):
            began_s = time.monotonic()
            while (waited_s := time.monotonic() - began_s) < _GIVE_UP_S:
                reason, ranks = self.hanging()
                wrong |= set(ranks) - {culprit}
                if culprit in ranks and f"rank {culprit} (pid {self.pids[culprit]}, " in reason:
                    break
                time.sleep(_POLL_S)
        while self.hanging()[1]:
            time.sleep(_POLL_S)
        return {"named_after_s": waited_s, "wrong": sorted(wrong), "ok": waited_s < WITHIN_S + 2 * BEAT_S and not wrong}


def run(num_ranks: int, trials: int, window_s: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as log:
        arguments = "--diagnose-dir", log, "--diagnose-window", str(window_s)
        patient = {"timeout_s": 300, "variables": {"EPRT_TIMEOUT_S": "60"}}
        done: list[dict[str, Any]] = []
        with (
            RunningServer(DEMO_MODEL, num_ranks, *arguments, **patient) as server,
            SteadyLoad(server.url, 4 * num_ranks),
        ):
            watched = Watched(server.url)
            time.sleep(3)
            num_false = watched.calm(_CALM_S)
            for trial in range(trials):
                done.append(watched.trial((trial * 7 + 1) % num_ranks))
                print(f"{num_ranks} ranks, trial {trial}: {done[-1]}", flush=True)
                num_false += watched.calm(1.0)
        logged = [finding.rank for finding in analyse(log).findings if finding.kind == "hang"]
    expected = [(trial * 7 + 1) % num_ranks for trial in range(trials)]
    after_s = [each["named_after_s"] for each in done]
    return {
        "ranks": num_ranks,
        "trials": trials,
        "named_in_time": sum(each["ok"] for each in done),
        "median_s": round(statistics.median(after_s), 2),
        "longest_s": round(max(after_s), 2),
        "wrong_ranks": sum(len(each["wrong"]) for each in done),
        "named_while_calm": num_false,
        "in_the_log": sum(min(logged.count(rank), expected.count(rank)) for rank in set(expected)),
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.diagnosis.bench_hangs", description=__doc__)
    parser.add_argument("--trials", type=int, default=20, help="of each number of ranks, default 20")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3, 4], help="default 2 3 4")
    parser.add_argument("--window", type=float, default=10.0, help="seconds of a window, default 10")
    options = parser.parse_args(argv)
    config = {"cores": os.cpu_count(), "window_s": options.window, "load_average": os.getloadavg()[2]}
    report = BenchmarkReport("hangs", config)
    rows = [run(num_ranks, options.trials, options.window) for num_ranks in options.ranks]
    for row in rows:
        report.add_row(**row)
    report.finish()
    return (
        0
        if all(r["named_in_time"] == r["trials"] and not r["wrong_ranks"] + r["named_while_calm"] for r in rows)
        else 1
    )


if __name__ == "__main__":
    sys.exit(main())
