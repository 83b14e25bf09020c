"""Ranks of a loaded server whose cgroup gets a quota: whether the diagnosis calls it a processor's fault, and how soon.

    python -m benchmarks.diagnosis.bench_throttling [--trials 20] [--ranks 4] [--window 3]

A server of CPU ranks decodes. One rank after the other is put into a cgroup of its own with 15 or 20 % of a core, until
a finding names the rank, and two windows longer; then it gets its cores back. The finding must be its column with cause
comp, each time that it is told; the rank's weight for the balancer may never be further from 1 than the finding's
ratio, and after each trial it must be back at 1.

Other programs may take cores away. A rank that takes less than an even share of the cores before a trial therefore gets
a quota that is as much smaller. The kernel's own counters (cpu.stat) say what a quota did: where it was used up in less
than half of the periods, nothing was throttled, and the trial is made again. Needs a writable cgroup hierarchy (version
1 or 2) with the cpu controller: root, as a rule.
"""

import argparse
import contextlib
import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx

from benchmarks.diagnosis.live_faults import SteadyLoad
from benchmarks.shapes import DEMO_MODEL
from benchmarks.tools.report import BenchmarkReport
from eprt.serve.running import RunningServer

NUM_RANKS = 0
NEEDS = "a writable cpu cgroup (root)"
ON_REQUEST = "takes 10 minutes"

CGROUPS = Path("/sys/fs/cgroup")
PERIOD_US = 100_000
QUOTAS = (0.15, 0.2)  # of a core
LEAST_QUOTA = 0.01  # the kernel's least: a millisecond of a period
LEAST_THROTTLED = 0.5  # of a quota's periods
ROUNDING = 0.01  # weights and ratios are told with two or three digits
_POLL_S, _GIVE_UP_S, _TAKES_S = 0.25, 60.0, 2.0


class QuotaGroup:
    """A cgroup of our own, in which a process may use so much of one core: for one holding."""

    def __init__(self, quota: float, root: Path):
        self._home = root / "cpu" if (root / "cpu" / "cgroup.procs").exists() else root
        self._folder = self._home / f"eprt_throttling_{os.getpid()}"
        self._folder.mkdir()
        quota_us = int(quota * PERIOD_US)
        try:
            if (self._folder / "cpu.cfs_quota_us").exists():  # version 1
                (self._folder / "cpu.cfs_period_us").write_text(str(PERIOD_US))
                (self._folder / "cpu.cfs_quota_us").write_text(str(quota_us))
            else:
                (self._folder / "cpu.max").write_text(f"{quota_us} {PERIOD_US}")
        except OSError:
            self._folder.rmdir()
            raise

    @contextlib.contextmanager
    def holding(self, pid: int) -> Iterator[None]:
        try:
            (self._folder / "cgroup.procs").write_text(str(pid))
            yield
        finally:
            with contextlib.suppress(ProcessLookupError):
                (self._home / "cgroup.procs").write_text(str(pid))
            self._folder.rmdir()

    def throttling(self) -> dict[str, float]:
        """What the kernel has counted: in which part of the quota's periods it was used up, and for how long."""
        lines = (self._folder / "cpu.stat").read_text().splitlines()
        counts = {name: int(value) for name, value in (line.split() for line in lines)}
        throttled_s = counts["throttled_usec"] / 1e6 if "throttled_usec" in counts else counts["throttled_time"] / 1e9
        share = counts["nr_throttled"] / max(1, counts["nr_periods"])
        return {"throttled_share": round(share, 3), "throttled_s": round(throttled_s, 2)}


def check_quotas(cgroups: Path) -> None:
    """SystemExit saying why where this process can set no quota."""
    try:
        group = QuotaGroup(QUOTAS[0], cgroups)
        with group.holding(os.getpid()):
            group.throttling()
    except OSError as error:
        where = error.filename or cgroups
        raise SystemExit(f"{where}: {error.strerror}: no quota can be set here; needs {NEEDS}") from None


def taken_cores(pid: int, seconds: float = _TAKES_S) -> float:
    """Cores that a process uses, measured for so long."""

    def used_s() -> float:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    before_s, began_s = used_s(), time.monotonic()
    time.sleep(seconds)
    return (used_s() - before_s) / (time.monotonic() - began_s)


def quota_of(part: float, taken: float, even_share: float) -> float:
    """part: of a core, for a rank that takes an even share of the cores. Of one that takes less, as much less."""
    return max(LEAST_QUOTA, part * min(1.0, taken / even_share))


class ThrottledServer:
    """Asks the diagnosis while ranks are throttled."""

    def __init__(self, url: str, window_s: float):
        self._http, self._window_s = httpx.Client(base_url=url, timeout=60), window_s
        self._pids = {rank["rank"]: rank["pid"] for rank in self._http.get("/health").json()["ranks"]}
        self._even_share = min(1.0, (os.cpu_count() or 1) / len(self._pids))
        self.num_weights_too_low = 0
        self.besides: set[str] = set()  # what else was told in the latest trial

    def _told(self, rank: int) -> tuple[list[dict[str, Any]], float]:
        """The active findings about a rank, and its weight."""
        answer = self._http.get("/v1/eprt/diagnose")
        if answer.is_error:
            raise RuntimeError(f"/v1/eprt/diagnose answers {answer.status_code}: {answer.text}")
        document = answer.json()
        newest = document["newest_window"] or 0
        # As in the server's log: what began in the newest window may yet turn out as an echo.
        told = [f for f in document["findings"] if f["active"] and f["first_window"] < newest]
        own = [f for f in told if f["rank"] == rank and f["kind"] == "column"]
        self.besides |= {f"{f['kind']} {f['rank']} {f['src']}-{f['dst']}" for f in told if f not in own}
        return own, document["rank_speeds"][rank]

    def trial(self, rank: int, part: float) -> dict[str, Any]:
        taken = taken_cores(self._pids[rank])
        quota = quota_of(part, taken, self._even_share)
        group = QuotaGroup(quota, CGROUPS)
        causes: set[str] = set()
        named_s, ratio, weight, evidence = None, 1.0, 1.0, ""
        self.besides = set()
        with group.holding(self._pids[rank]):
            began_s = time.monotonic()
            while (now_s := time.monotonic() - began_s) < _GIVE_UP_S:
                findings, speed = self._told(rank)
                for finding in findings:
                    named_s = now_s if named_s is None else named_s
                    causes.add(finding["cause"])
                    ratio, weight, evidence = finding["ratio"], speed, finding["evidence"]
                    self.num_weights_too_low += speed < 1 / ratio - ROUNDING
                if named_s is not None and now_s - named_s > 2 * self._window_s:
                    break
                time.sleep(_POLL_S)
            throttling = group.throttling()
        besides = sorted(self.besides)
        recovered_s = self._wait_for_weight(rank)
        return {
            "rank": rank,
            "taken_cores": round(taken, 3),
            "quota": round(quota, 3),
            **throttling,
            "named_after_s": named_s,
            "causes": sorted(causes),
            "besides": besides,
            "ratio": ratio,
            "weight": weight,
            "weight_back_after_s": recovered_s,
            "evidence": evidence,
        }

    def _wait_for_weight(self, rank: int) -> float | None:
        """Seconds until the rank is no longer named and weighs 1 again."""
        began_s = time.monotonic()
        while (waited_s := time.monotonic() - began_s) < _GIVE_UP_S:
            findings, speed = self._told(rank)
            if not findings and speed == 1.0:
                return waited_s
            time.sleep(_POLL_S)
        return None


def is_throttled(trial: dict[str, Any]) -> bool:
    return trial["throttled_share"] >= LEAST_THROTTLED


def summary(trials: Sequence[dict[str, Any]], num_weights_too_low: int) -> dict[str, Any]:
    """Of the trials in which the quota held the rank back; the others are only counted."""
    valid = [each for each in trials if is_throttled(each)]
    named = [each for each in valid if each["causes"]]
    back = [each["weight_back_after_s"] for each in valid if each["weight_back_after_s"] is not None]
    return {
        "trials": len(valid),
        "without_throttling": len(trials) - len(valid),
        "throttled_share_least": min((each["throttled_share"] for each in valid), default=0.0),
        "named": len(named),
        "named_comp": sum(each["causes"] == ["comp"] for each in named),
        "other_causes": sorted({cause for each in named for cause in each["causes"]} - {"comp"}),
        "median_s": round(statistics.median([each["named_after_s"] for each in named] or [0.0]), 1),
        "weights_too_low": num_weights_too_low,
        "weights_back": len(back),
        "weight_back_after_median_s": round(statistics.median(back or [0.0]), 1),
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.diagnosis.bench_throttling", description=__doc__)
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--ranks", type=int, default=4, help="4 or more, default 4")
    parser.add_argument("--window", type=float, default=3.0, help="seconds of a window, default 3")
    options = parser.parse_args(argv)
    check_quotas(CGROUPS)
    arguments = "--diagnose-window", str(options.window)
    config = {"cores": os.cpu_count(), "window_s": options.window, "load_average": os.getloadavg()[0]}
    report, trials = BenchmarkReport("throttling", config), []
    patient = {"timeout_s": 300, "variables": {"EPRT_TIMEOUT_S": "120"}}
    with (
        RunningServer(DEMO_MODEL, options.ranks, *arguments, **patient) as server,
        SteadyLoad(server.url, 4 * options.ranks),
    ):
        watched = ThrottledServer(server.url, options.window)
        time.sleep(5 * options.window)
        while sum(map(is_throttled, trials)) < options.trials and len(trials) < 2 * options.trials:
            k = len(trials)
            trials.append(watched.trial((3 * k + 1) % options.ranks, QUOTAS[k % len(QUOTAS)]))
            print(f"trial {k}: {trials[-1]}", flush=True)
    told = summary(trials, watched.num_weights_too_low)
    report.add_row(ranks=options.ranks, **told)
    report.finish()
    good = told["named_comp"] == told["weights_back"] == options.trials and not told["weights_too_low"]
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
