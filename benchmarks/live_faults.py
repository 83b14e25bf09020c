"""Real faults in a running server, found from its real waits: a paused rank, a delayed link, and the other kinds.

    python -m benchmarks.live_faults [--ranks 8] [--only slow-rank slow-link] [--screenshots DIR]

A server of CPU ranks has a steady load. First nothing is wrong with it, then one rank is paused half of the time
(SIGSTOP, SIGCONT), then nothing again, then what one rank sends to another is late, and so on; the faults are real, as
`--inject` makes them. Asked four times a second, /v1/eprt/diagnose must name each rank or link within 30 s, and nobody
else at any time. The ranks may well outnumber the cores: what scheduling does to the waits is part of the test.
"""

import argparse
import contextlib
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from benchmarks.report import ROOT, Report
from eprt.serve.running import RunningServer

MODEL = ROOT / "examples" / "demo_model" / "checkpoint"
# What is done, and what is to be found: of a link, who waits for whom.
FAULTS = [
    ("slow-rank:3:2x", ("column", 3)),
    ("slow-link:2:5:20ms", ("point", 2, 5)),
    ("late-compute:4:20ms", ("column", 4)),
    ("bursty:6:40ms", ("column", 6)),
    ("stop:7:5s", ("column", 7)),
    ("skewed-tokens:1:4x", ("column", 1)),
]
MAY_COST_NOTHING = "skewed-tokens"  # the demo model's experts take a few per cent of a call
WITHIN_S = 30.0
_POLL_S = 0.25
_SHOT_AFTER_S = 12.0


@dataclass
class Phase:
    """What is wrong from start_s to end_s, and what was said then. Seconds since the ranks began to serve."""

    name: str
    expected: tuple | None
    start_s: float
    end_s: float
    named_s: float | None = None
    cause: str = ""
    ratio: float = 0.0
    others: dict[tuple, str] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        in_time = self.named_s is not None and self.named_s - self.start_s <= WITHIN_S
        return not self.others and (self.expected is None or in_time or self.name.startswith(MAY_COST_NOTHING))


def place_of(finding: Mapping[str, Any]) -> tuple:
    kind = finding["kind"]
    return (kind, finding["src"], finding["dst"]) if kind == "point" else (kind, finding["rank"])


@contextlib.contextmanager
def steady_load(url: str, num_sequences: int, num_clients: int = 2) -> Iterator[None]:
    """num_sequences at any time, in requests of equal size that follow each other."""
    done = threading.Event()

    def keep_busy(k: int) -> None:
        while not done.is_set():
            body = {"prompt": f"Count from {k} to 90.", "max_tokens": 96, "ignore_eos": True, "temperature": 1,
                    "n": num_sequences // num_clients}  # fmt: skip
            with contextlib.suppress(httpx.HTTPError):
                httpx.post(f"{url}/v1/completions", json=body, timeout=120)

    threads = [threading.Thread(target=keep_busy, args=(k,)) for k in range(num_clients)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        done.set()
        for thread in threads:
            thread.join()


def watch(url: str, phases: Sequence[Phase], began_s: float, shoot: Callable[[Phase], None], verbose: bool) -> int:
    """Fills the phases in; returns the number of windows. shoot: called once a phase, after its fault was named."""
    said = None
    document: dict[str, Any] = {}
    with httpx.Client(base_url=url, timeout=30) as client:
        for phase in phases:
            shot = False
            while (now_s := time.monotonic() - began_s) < phase.end_s:
                document = client.get("/v1/eprt/diagnose").json()
                newest = document["newest_window"]
                # As in the server's log: what began in the newest window may yet turn out as an echo.
                told = [f for f in document["findings"] if f["first_window"] < newest]
                current = [f for f in told if f["last_window"] >= newest - 1]
                if verbose and newest != said:
                    said = newest
                    names = [f"{place_of(f)} {f['cause']} {f['ratio']}x z{f['score']}" for f in current]
                    print(f"{now_s:6.1f} s {phase.name:10} window {newest}: {'; '.join(names) or '-'}", flush=True)
                _take_in(phase, phases, current, now_s)
                if phase.named_s is not None and not shot and now_s - phase.named_s > _SHOT_AFTER_S:
                    shot = True
                    shoot(phase)
                time.sleep(_POLL_S)
    return document["windows"]


def _take_in(phase: Phase, phases: Sequence[Phase], current: Sequence[Mapping[str, Any]], now_s: float) -> None:
    # A fault is in the window during which it ended, and in its analysis.
    before = [p.expected for p in phases if p.end_s <= phase.start_s]
    for finding in current:
        place = place_of(finding)
        if place == phase.expected:
            if phase.named_s is None:
                phase.named_s = now_s
            phase.cause, phase.ratio = finding["cause"], finding["ratio"]
        elif place not in before:
            phase.others[place] = finding["evidence"]


def screenshot(url: str, path: Path, finding: str) -> None:
    """The page in headless Chromium, with the finding of these words chosen."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        executable = shutil.which("chromium") or shutil.which("google-chrome")
        browser = play.chromium.launch(executable_path=executable, args=["--no-sandbox"] if os.geteuid() == 0 else [])
        page = browser.new_page(viewport={"width": 1440, "height": 940}, color_scheme="dark")
        page.goto(f"{url}/v1/eprt/diagnose/page/")
        page.wait_for_selector("#verdict:not(:empty)", timeout=60_000)
        page.locator("#finding-list button", has_text=finding).first.click()
        page.wait_for_timeout(1500)
        page.screenshot(path=path)
        browser.close()


def plan(faults: Sequence[tuple[str, tuple]], clean_s: float, fault_s: float) -> tuple[list[Phase], list[str]]:
    """The phases, clean ones between faults, and the faults as --inject takes them."""
    phases, injected = [Phase("clean", None, 0.0, clean_s)], []
    for fault, expected in faults:
        start_s = phases[-1].end_s
        end_s = start_s + fault_s
        injected.append(f"{fault}@{start_s:g}-{end_s:g}")
        phases += [Phase(fault, expected, start_s, end_s), Phase("clean", None, end_s, end_s + fault_s / 2)]
    return phases[:-1], injected


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.live_faults", description=__doc__)
    parser.add_argument("--ranks", type=int, default=8, help="8 or more")
    parser.add_argument("--only", nargs="+", metavar="KIND", help="of slow-rank, slow-link, ...; default: all")
    parser.add_argument("--window", type=float, default=3.0, help="seconds of a window, default 3")
    parser.add_argument("--clean", type=float, default=60.0, help="seconds without a fault, default 60")
    parser.add_argument("--fault", type=float, default=36.0, help="seconds of each fault, default 36")
    parser.add_argument("--sequences", type=int, default=16)
    parser.add_argument("--screenshots", type=Path, metavar="DIR")
    parser.add_argument("--log", type=Path, metavar="DIR", help="keep the diagnosis log there")
    options = parser.parse_args(argv)
    faults = [fault for fault in FAULTS if not options.only or fault[0].partition(":")[0] in options.only]
    phases, injected = plan(faults, options.clean, options.fault)
    arguments = [part for fault in injected for part in ("--inject", fault)]
    if options.log:
        arguments += ["--diagnose-dir", str(options.log)]
    arguments += ["--diagnose-window", str(options.window)]
    # Many ranks on few cores load slowly, and one after the other.
    patient = {"timeout_s": 300, "variables": {"EPRT_TIMEOUT_S": "120"}}
    with RunningServer(MODEL, options.ranks, *arguments, **patient) as server:
        began_s = time.monotonic()

        def shoot(phase: Phase) -> None:
            if options.screenshots and phase.expected:
                kind, *ranks = phase.expected
                words = f"Rank {ranks[0]}" if kind == "column" else f"Link {ranks[1]} → {ranks[0]}"
                options.screenshots.mkdir(parents=True, exist_ok=True)
                screenshot(server.url, options.screenshots / f"{phase.name.partition(':')[0]}.png", words)

        with steady_load(server.url, options.sequences):
            num_windows = watch(server.url, phases, began_s, shoot, verbose=True)
        print("\n".join(line for line in server.output().splitlines() if "diagnosis" in line))
    config = {"ranks": options.ranks, "cores": os.cpu_count(), "window_s": options.window,
              "sequences": options.sequences, "windows": num_windows, "load_average": os.getloadavg()[2]}  # fmt: skip
    report = Report("live_faults", config)
    for phase in phases:
        report.row(
            phase=phase.name,
            seconds=phase.end_s - phase.start_s,
            expected=" ".join(map(str, phase.expected or ("nothing",))),
            named_after_s="" if phase.named_s is None else round(phase.named_s - phase.start_s, 1),
            cause=phase.cause,
            ratio=phase.ratio or "",
            other_findings="; ".join(" ".join(map(str, place)) for place in phase.others),
            ok=phase.ok,
        )
    report.finish()
    return 0 if all(phase.ok for phase in phases) else 1


if __name__ == "__main__":
    sys.exit(main())
