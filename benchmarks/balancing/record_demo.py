"""Records benchmarks/traces/demo.npz: the demo model's own routing while the questions that it is asked change.

    make serve &                                     # or any server of the demo model
    python -m benchmarks.balancing.record_demo --url http://127.0.0.1:8000

Four clients ask held-out questions without a pause. Each skill's share of the questions rises and falls, every skill at
another time, so that the load drifts from window to window, as with users of several time zones. `eprt balance record`
records windows and routing sample.
"""

import argparse
import json
import math
import random
import sys
import threading
import time
import urllib.request
from pathlib import Path

from eprt.balancer.__main__ import main as balance

from benchmarks.tools.report import ROOT
from examples.demo_model import skills

NUM_RANKS = 0
ON_REQUEST = "needs a running server, writes benchmarks/traces"

TRACE = ROOT / "benchmarks" / "traces" / "demo.npz"
_CLIENTS = 4


def ask(url: str, rng: random.Random, begun_s: float, period_s: float, stop: threading.Event) -> None:
    names = sorted(skills.SKILLS)
    while not stop.is_set():
        turn = (time.monotonic() - begun_s) / period_s
        weights = [math.exp(2 * math.cos(2 * math.pi * (turn + i / len(names)))) for i in range(len(names))]
        sample = skills.draw(rng.choices(names, weights)[0], rng, held_out=True)
        body = {"model": "demo", "messages": list(sample.messages), "max_tokens": 64, "temperature": 0}
        if sample.tools:
            body["tools"] = list(sample.tools)
        request = urllib.request.Request(
            f"{url}/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            response.read()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", required=True)
    parser.add_argument("--windows", type=int, default=24)
    parser.add_argument("--window-s", type=float, default=5.0)
    parser.add_argument("--out", type=Path, default=TRACE)
    arguments = parser.parse_args()
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    stop, begun_s = threading.Event(), time.monotonic()
    period_s = arguments.windows * arguments.window_s
    threads = [
        threading.Thread(target=ask, args=(arguments.url, random.Random(i), begun_s, period_s, stop), daemon=True)
        for i in range(_CLIENTS)
    ]
    for thread in threads:
        thread.start()
    wanted = ("--windows", str(arguments.windows), "--window-s", str(arguments.window_s))
    status = balance(["record", "--url", arguments.url, "--out", str(arguments.out), *wanted])
    stop.set()
    for thread in threads:
        thread.join(timeout=60)
    return status


if __name__ == "__main__":
    sys.exit(main())
