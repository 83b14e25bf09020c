"""Real faults in a running server, found from its waits: a paused rank, a delayed link, and the other kinds.

    python -m benchmarks.diagnosis.live_faults [--ranks 8] [--only slow-rank slow-link] [--screenshots DIR]

A server of CPU ranks has a steady load: it decodes, and while tokens are skewed it prefills long prompts, because only
then do the demo model's experts take a notable share of the time. Phases alternate: no fault, one rank paused half of
the time (SIGSTOP, SIGCONT), no fault, one link delayed, and so on; `--inject` makes the faults. /v1/eprt/diagnose is
asked four times a second. It must name each rank or link and its cause within 30 s, and nothing else at any time. The
ranks may outnumber the cores: the effect of scheduling on the waits is part of the test.
"""

import argparse
import contextlib
import os
import random
import shutil
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from benchmarks.shapes import DEMO_MODEL
from benchmarks.tools.report import BenchmarkReport
from eprt.serve.running import RunningServer

# Injected fault, expected place, expected cause. Of a link: who waits for whom.
FAULTS = [
    ("slow-rank:3:2x", ("column", 3), "comp"),
    ("slow-link:2:5:20ms", ("point", 2, 5), "comm"),
    ("late-compute:4:20ms", ("column", 4), "comp"),
    ("bursty:6:40ms", ("column", 6), "comp"),
    ("stop:7:5s", ("hang", 7), "stopped"),
    ("skewed-tokens:1:4x", ("column", 1), "mixed"),
]
READS_PROMPTS = "skewed-tokens"  # in decodes the demo model's experts take a few per cent of a call
PROMPT_TOKENS, VOCABULARY = 1024, (10, 600)  # numbers of tokens that are words of the demo model
NUM_RANKS = 0
ON_REQUEST = "takes 6 minutes"

WITHIN_S = 30.0
_POLL_S = 0.25
_SHOT_AFTER_S = 12.0


@dataclass
class FaultPhase:
    """A time with one fault or none, and what the diagnosis said then."""

    name: str
    expected: tuple | None  # place; None: no fault
    start_s: float  # since the ranks began to serve, like the other times
    end_s: float
    expected_cause: str = ""
    named_s: float | None = None  # when the expected place was named first
    cause: str = ""  # as named
    ratio: float = 0.0
    others: dict[tuple, str] = field(default_factory=dict)  # unexpected places -> cause

    @property
    def ok(self) -> bool:
        in_time = self.named_s is not None and self.named_s - self.start_s <= WITHIN_S
        return not self.others and (self.expected is None or (in_time and self.cause == self.expected_cause))


def place_of(finding: Mapping[str, Any]) -> tuple:
    kind = finding["kind"]
    return (kind, finding["src"], finding["dst"]) if kind == "point" else (kind, finding["rank"])


class SteadyLoad:
    """Requests that follow each other, num_sequences at any time.

    They decode answers of equal size or, while reads_prompts, prefill long prompts of which no two begin alike.
    """

    def __init__(self, url: str, num_sequences: int, num_clients: int = 2):
        self.reads_prompts = False
        self._url, self._per_client = url, num_sequences // num_clients
        self._done = threading.Event()
        self._threads = [threading.Thread(target=self._keep_busy, args=(k,)) for k in range(num_clients)]

    def _body(self, rng: random.Random) -> dict[str, Any]:
        if self.reads_prompts:
            prompts = [[rng.randrange(*VOCABULARY) for _ in range(PROMPT_TOKENS)] for _ in range(self._per_client)]
            return {"prompt": prompts, "max_tokens": 1, "ignore_eos": True}
        prompt = f"Count from {rng.randrange(20)} to 90."
        return {"prompt": prompt, "max_tokens": 96, "ignore_eos": True, "temperature": 1, "n": self._per_client}

    def _keep_busy(self, seed: int) -> None:
        rng = random.Random(seed)
        while not self._done.is_set():
            with contextlib.suppress(httpx.HTTPError):
                httpx.post(f"{self._url}/v1/completions", json=self._body(rng), timeout=120)

    def __enter__(self) -> "SteadyLoad":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exc_info) -> None:
        self._done.set()
        for thread in self._threads:
            thread.join()


def watch(
    url: str, phases: Sequence[FaultPhase], began_s: float, load: SteadyLoad, shoot: Callable[[FaultPhase], None]
) -> int:
    """Fills the phases in; returns the number of windows. shoot: called once a phase, after its fault was named."""
    said = None
    document: dict[str, Any] = {}
    with httpx.Client(base_url=url, timeout=30) as client:
        for k, phase in enumerate(phases):
            shot = False
            # From the phase before on, so that what a change of load does is not taken for the fault.
            load.reads_prompts = any(p.name.startswith(READS_PROMPTS) for p in phases[k : k + 2])
            while (now_s := time.monotonic() - began_s) < phase.end_s:
                document = client.get("/v1/eprt/diagnose").json()
                newest = document["newest_window"]
                # As in the server's log: what began in the newest window may yet turn out as an echo.
                told = [f for f in document["findings"] if f["kind"] == "hang" or f["first_window"] < newest]
                current = [f for f in told if f["last_window"] >= newest - 1]
                if newest != said:
                    said = newest
                    names = [f"{place_of(f)} {f['cause']} {f['ratio']}x z{f['score']}" for f in current]
                    print(f"{now_s:6.1f} s {phase.name:10} window {newest}: {'; '.join(names) or '-'}", flush=True)
                _take_in(phase, phases, current, now_s)
                if phase.named_s is not None and not shot and now_s - phase.named_s > _SHOT_AFTER_S:
                    shot = True
                    shoot(phase)
                time.sleep(_POLL_S)
    return document["windows"]


def _take_in(
    phase: FaultPhase, phases: Sequence[FaultPhase], current: Sequence[Mapping[str, Any]], now_s: float
) -> None:
    # A fault is in the window during which it ended, and in its analysis. A rank that hung was late.
    before = [p.expected for p in phases if p.end_s <= phase.start_s]
    before += [
        ("column", p.expected[1]) for p in phases if p.expected and p.expected[0] == "hang" and p.start_s <= now_s
    ]
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


def plan(
    faults: Sequence[tuple[str, tuple, str]], clean_s: float, fault_s: float
) -> tuple[list[FaultPhase], list[str]]:
    """The phases, clean ones between faults, and the faults as --inject takes them."""
    phases, injected = [FaultPhase("clean", None, 0.0, clean_s)], []
    for fault, expected, cause in faults:
        start_s = phases[-1].end_s
        end_s = start_s + fault_s
        injected.append(f"{fault}@{start_s:g}-{end_s:g}")
        phases += [
            FaultPhase(fault, expected, start_s, end_s, cause),
            FaultPhase("clean", None, end_s, end_s + fault_s / 2),
        ]
    return phases[:-1], injected


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.diagnosis.live_faults", description=__doc__)
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
    with RunningServer(DEMO_MODEL, options.ranks, *arguments, **patient) as server:
        began_s = time.monotonic()

        def shoot(phase: FaultPhase) -> None:
            if options.screenshots and phase.expected:
                kind, *ranks = phase.expected
                words = f"Link {ranks[1]} → {ranks[0]}" if kind == "point" else f"Rank {ranks[0]}"
                options.screenshots.mkdir(parents=True, exist_ok=True)
                screenshot(server.url, options.screenshots / f"{phase.name.partition(':')[0]}.png", words)

        with SteadyLoad(server.url, options.sequences) as load:
            num_windows = watch(server.url, phases, began_s, load, shoot)
        print("\n".join(line for line in server.output().splitlines() if "diagnosis" in line))
    config = {
        "ranks": options.ranks,
        "cores": os.cpu_count(),
        "window_s": options.window,
        "sequences": options.sequences,
        "windows": num_windows,
        "load_average": os.getloadavg()[2],
    }
    report = BenchmarkReport("live_faults", config)
    for phase in phases:
        report.add_row(
            phase=phase.name,
            seconds=phase.end_s - phase.start_s,
            expected=" ".join(map(str, phase.expected or ("nothing",))),
            named_after_s="" if phase.named_s is None else round(phase.named_s - phase.start_s, 1),
            cause=phase.cause,
            ratio=phase.ratio or "",  # of a hang none
            other_findings="; ".join(" ".join(map(str, place)) for place in phase.others),
            ok=phase.ok,
        )
    report.finish()
    return 0 if all(phase.ok for phase in phases) else 1


if __name__ == "__main__":
    sys.exit(main())
